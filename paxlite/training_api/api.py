"""The paths of the training API, as the package tinker (0.38) asks them, under /api/v1."""

from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from paxlite.config.generation import Sampling
from paxlite.core.errors import UserError
from paxlite.core.json_text import JsonObject
from paxlite.generation.request import Request
from paxlite.generation.sampling import MOST_ENDS, MOST_TOP
from paxlite.serving.application import Application
from paxlite.serving.errors import ApiError
from paxlite.serving.fields import RequestFields
from paxlite.training_api import wire
from paxlite.training_api.adapted_model import AdapterKind
from paxlite.training_api.device import SampledAdapter
from paxlite.training_api.examples import examples_of
from paxlite.training_api.promises import Promises
from paxlite.training_api.saved_adapters import SAMPLER, TRAINING
from paxlite.training_api.sessions import Session, Sessions, TrainingRun, seed_of
from paxlite.training_api.trained_adapter import AdamValues, TrainedAdapter

_POLL_SECONDS = 20.0  # that a client waits for a result before it asks again
_MOST_SAMPLES, _MOST_STOPS, _MOST_RANK, _MOST_TOKENS = 128, 16, 1024, 1 << 20
_MOST = 1e9  # of numbers that have no bound of their own
# They change nothing here; docs/training_api.md says so.
_IGNORED = (
  'type', 'tags', 'sdk_version', 'project_id', 'display_name', 'user_metadata', 'ttl_seconds',
  'allow_metadata_only', 'reason', 'detail',
)  # fmt: skip
_REFUSED: Mapping[str, Collection[Any]] = {
  'weights_access_token': (), 'target_prompt_logprobs': (), 'prompt_alt_tokens_k': (0,),
  'record_stability_info': (False,), 'kind': ('snapshot',), 'optimizer_params': (),
  'age_encryption_recipients': (),
}  # fmt: skip
_CONFIG = {
  'pjwt_auth_enabled': False, 'parallel_fwdbwd_chunks': True, 'proto_compress_fwdbwd': False,
  'use_pyqwest_transport': False, 'sample_max_concurrent_requests': 128,
  'sample_use_retrieve_futures': False, 'custom_loss_server_side': False,
  'sample_join_sampling_session': False,
}  # fmt: skip
_DYNAMIC_CONFIG = {'sample_cancel_enabled': True}
_HEAD = 'The head gets no factors here: train_unembed changes nothing.'

Answer = Callable[[RequestFields], JsonObject]


class TrainingApi(Application):
  """Answers the clients.

  Args:
    sessions: Their sessions.
    model: What clients call the base model.
    max_tokens: The most new tokens of a sample.
    key, hosts: See Application.
  """

  key_form = ('X-API-Key', 'KEY')

  def __init__(
    self,
    sessions: Sessions,
    model: str,
    max_tokens: int,
    key: str = '',
    hosts: Collection[str] = (),
  ):
    super().__init__(key, hosts)
    self._sessions, self._device, self._base = sessions, sessions.device, sessions.device.base
    self._model, self._max_tokens = model, max_tokens

  @property
  def routes(self) -> list[Route]:
    posts: Mapping[str, Answer] = {
      'client/config': lambda fields: dict(_CONFIG),
      'client/dynamic_config': lambda fields: dict(_DYNAMIC_CONFIG),
      'create_session': self._create_session,
      'session_heartbeat': self._heartbeat,
      'create_model': self._create_model,
      'get_info': self._info,
      'optim_step': self._optim_step,
      'save_weights': self._save,
      'save_weights_for_sampler': self._save_for_sampler,
      'load_weights': self._load,
      'create_sampling_session': self._create_sampler,
      'asample': self._sample,
      'cancel_future': self._cancel,
    }
    others: Mapping[str, tuple[str, Callable[[HttpRequest], Awaitable[Response]]]] = {
      'healthz': ('GET', self._health),
      'get_server_capabilities': ('GET', self._capabilities),
      'samplers/{id}': ('GET', self._sampler),
      'sessions/{id}/finish': ('POST', self._finish),
      'telemetry': ('POST', self._telemetry),
      'forward_backward': ('POST', self._forward_backward),
      'retrieve_future': ('POST', self._retrieve),
    }
    found = [(path, 'POST', self._of_json(answer)) for path, answer in posts.items()]
    found += [(path, method, answer) for path, (method, answer) in others.items()]
    routes = [Route(f'/api/v1/{path}', end, methods=[method]) for path, method, end in found]
    return [*routes, Route('/health', self._health)]

  def _of_json(self, answer: Answer) -> Callable[[HttpRequest], Awaitable[Response]]:
    async def end(request: HttpRequest) -> Response:
      return JSONResponse(answer(await self._fields(request)))

    return end

  async def _fields(self, request: HttpRequest) -> RequestFields:
    self.check_key(request)
    return RequestFields(await self.body(request), _IGNORED, _REFUSED)

  # sessions

  def _create_session(self, fields: RequestFields) -> JsonObject:
    session = self._sessions.new()
    return dict(type='create_session', session_id=session.id, info_message=_HEAD)

  def _heartbeat(self, fields: RequestFields) -> JsonObject:
    self._sessions.of(fields.get('session_id'))
    return dict(type='session_heartbeat')

  async def _finish(self, request: HttpRequest) -> Response:
    self.check_key(request)
    self._sessions.end(self._sessions.of(request.path_params['id']))
    return JSONResponse({})

  async def _telemetry(self, request: HttpRequest) -> Response:
    self.check_key(request)
    await self.raw_body(request)  # nothing of it is read
    return JSONResponse(dict(status='accepted'))

  async def _health(self, request: HttpRequest) -> Response:
    return JSONResponse(dict(status='ok', unanswered=self._sessions.count))

  async def _capabilities(self, request: HttpRequest) -> Response:
    self.check_key(request)
    model = dict(
      model_name=self._model, max_context_length=self._base.max_length, trainable=True,
      sampleable=True,
    )  # fmt: skip
    return JSONResponse(dict(supported_models=[model]))

  # results

  async def _retrieve(self, request: HttpRequest) -> Response:
    fields = await self._fields(request)
    promises, id = self._promises(fields)
    if (promise := promises.get(id)) is None:
      raise ApiError(f'request_id {id!r} is not known, or was fetched long ago', status=404)
    if not await promise.wait(_POLL_SECONDS):
      return JSONResponse(dict(type='try_again', request_id=id, queue_state='active'), 408)
    promises.fetched(promise)
    if isinstance(promise.result, bytes):
      return Response(promise.result, media_type=wire.TYPE)
    return JSONResponse(promise.result)

  def _cancel(self, fields: RequestFields) -> JsonObject:
    promises, id = self._promises(fields)
    if (promise := promises.get(id)) is not None:
      promise.is_cancelled = True
    return {}

  def _promises(self, fields: RequestFields) -> tuple[Promises, str]:
    id = str(fields.get('request_id'))
    return self._sessions.of(id).promises, id

  # training

  def _create_model(self, fields: RequestFields) -> JsonObject:
    session, number = self._place(fields)
    self._check_model(fields.get('base_model'))
    lora = _inner(fields.get('lora_config', {}), 'lora_config')
    rank = lora.integer('rank', 32, 1, _MOST_RANK) or 32
    seed = seed_of(lora.integer('seed', None, -(1 << 63), (1 << 63) - 1))
    attention, mlp = lora.flag('train_attn', True), lora.flag('train_mlp', True)
    lora.flag('train_unembed', True)
    lora.check_all_read()
    self._check_optimizer(fields)
    fields.check_all_read()
    if not attention and not mlp:
      raise ApiError('train_attn or train_mlp must be true: the head gets no factors here')
    kind = AdapterKind(rank, 'all' if attention and mlp else 'attention' if attention else 'mlp')

    def made() -> TrainedAdapter:
      model = self._device.model(kind)
      return TrainedAdapter(model, model.init(seed % (1 << 63)))

    return self._created(session, number, fields, made, {'type': 'create_model'})

  def _load(self, fields: RequestFields) -> JsonObject:
    path, with_moments = str(fields.get('path')), fields.flag('optimizer')
    if fields.get('base_model') is not None:
      self._check_model(fields.get('base_model'))
    told: JsonObject = {'type': 'load_weights', 'path': path}
    if 'session_id' in fields:
      session, number = self._place(fields)
      self._check_optimizer(fields)
      fields.check_all_read()
      make = lambda: self._device.loaded(path, with_moments)
      return self._created(session, number, fields, make, told)

    def load(adapter: TrainedAdapter) -> JsonObject:
      fields.check_all_read()
      found = self._device.saved.load(path, adapter.model, with_moments)
      adapter.replace(*found)
      return told

    return self._in_turn(fields, load)

  def _created(
    self,
    session: Session,
    number: int,
    fields: RequestFields,
    make: Callable[[], TrainedAdapter],
    told: JsonObject,
  ) -> JsonObject:
    run = self._sessions.new_run(session, number, fields.get('user_metadata', {}))

    def create() -> JsonObject:
      run.adapter = make()
      return {**told, 'model_id': run.id}

    promise = self._sessions.promise(
      session, f'{run.id}:0', lambda promise: self._device.submit(promise, create)
    )
    return dict(request_id=promise.id, model_id=run.id)

  def _info(self, fields: RequestFields) -> JsonObject:
    _, run = self._sessions.run_of(fields.get('model_id'))
    adapter = _adapter(run)
    described = dict(
      arch=type(self._base.experiment).__name__, model_name=self._model,
      tokenizer_id=self._base.tokenizer_place,
    )  # fmt: skip
    return dict(
      type='get_info', model_id=run.id, model_data=described, is_lora=True,
      lora_rank=adapter.model.kind.rank, model_name=self._model,
    )  # fmt: skip

  async def _forward_backward(self, request: HttpRequest) -> Response:
    self.check_key(request)
    try:
      message = await self.aside(wire.forward_backward_request, await self.raw_body(request))
    except ValueError as e:
      raise ApiError(f'The body is no ForwardBackwardRequest: {e}') from None
    learns = not message.forward_only

    def compute(adapter: TrainedAdapter) -> bytes:
      examples = examples_of(message, self._base.vocab_size, self._base.max_length)
      return wire.forward_backward_output(*adapter.run(examples, learns))

    def fail(adapter: TrainedAdapter, error: str) -> None:
      if learns:
        adapter.fail(error)

    promise = self._sessions.in_turn(message.model_id, message.seq_id, compute, fail)
    return JSONResponse(dict(request_id=promise.id, model_id=message.model_id))

  def _optim_step(self, fields: RequestFields) -> JsonObject:
    def step(adapter: TrainedAdapter) -> JsonObject:
      given = _inner(fields.get('adam_params', {}), 'adam_params')
      usual = AdamValues()
      below_1 = 1 - 1e-9
      values = AdamValues(
        given.number('learning_rate', usual.learning_rate, 0, _MOST),
        given.number('beta1', usual.beta1, 0, below_1),
        given.number('beta2', usual.beta2, 0, below_1),
        given.number('eps', usual.eps, 0, _MOST),
        given.number('weight_decay', usual.weight_decay, 0, _MOST),
        given.number('grad_clip_norm', usual.grad_clip_norm, -_MOST, _MOST),
      )
      given.check_all_read()
      fields.check_all_read()
      return dict(metrics=adapter.step(values))

    return self._in_turn(fields, step)

  def _save(self, fields: RequestFields) -> JsonObject:
    overwrite, name = fields.flag('overwrite'), fields.get('path')
    metadata = fields.get('user_metadata', {})
    id = fields.get('model_id')

    def save(adapter: TrainedAdapter) -> JsonObject:
      fields.check_all_read()
      path = self._device.saved.path(str(id), TRAINING, name)
      self._device.save(adapter, path, overwrite, metadata)
      return dict(type='save_weights', path=path)

    return self._in_turn(fields, save)

  def _save_for_sampler(self, fields: RequestFields) -> JsonObject:
    name, number = fields.get('path'), fields.integer('sampling_session_seq_id', 0, 0, 1 << 62)
    metadata = fields.get('user_metadata', {})
    session, run = self._sessions.run_of(fields.get('model_id'))
    sampler = SampledAdapter(is_held=True)
    id = '' if name is not None else session.add_sampler(number or 0, sampler)

    def save(adapter: TrainedAdapter) -> JsonObject:
      fields.check_all_read()
      told: JsonObject = {'type': 'save_weights_for_sampler'}
      if name is None:
        sampler.model, sampler.factors = adapter.model, adapter.factors
        return told | {'sampling_session_id': id}
      path = self._device.saved.path(run.id, SAMPLER, name)
      saved = SampledAdapter(adapter.model, adapter.factors)
      self._device.save(saved, path, False, metadata)
      return told | {'path': path}

    return self._in_turn(fields, save)

  def _in_turn(
    self, fields: RequestFields, compute: Callable[[TrainedAdapter], JsonObject]
  ) -> JsonObject:
    """Returns the id of a request that is computed in its turn, where wrong fields are found.

    A request that was refused at once would leave a gap among the numbers of those after it.
    """
    id, number = fields.get('model_id'), fields.integer('seq_id', None, 1, 1 << 31)
    return dict(request_id=self._sessions.in_turn(id, number, compute).id, model_id=str(id))

  # sampling

  def _create_sampler(self, fields: RequestFields) -> JsonObject:
    session = self._sessions.of(fields.get('session_id'))
    number = fields.integer('sampling_session_seq_id', 0, 0, 1 << 62) or 0
    name, path = fields.get('base_model'), str(fields.get('model_path', ''))
    fields.check_all_read()
    if name is not None or not path:
      self._check_model(name)
    if path:
      try:
        self._device.saved.kind(path)
      except UserError as e:
        raise ApiError(str(e), 'model_path', 'model_not_found', 404) from None
    id = session.add_sampler(number, SampledAdapter(path=path))
    return dict(type='create_sampling_session', sampling_session_id=id)

  async def _sampler(self, request: HttpRequest) -> Response:
    self.check_key(request)
    id = request.path_params['id']
    _, sampler = self._sessions.sampler_of(id)
    told = dict(sampler_id=id, base_model=self._model, model_path=sampler.path or None)
    return JSONResponse(told)

  def _sample(self, fields: RequestFields) -> JsonObject:
    id = str(fields.get('sampling_session_id'))
    session, sampler = self._sessions.sampler_of(id)
    number = fields.integer('seq_id', None, 0, 1 << 62)
    count = fields.integer('num_samples', 1, 1, _MOST_SAMPLES) or 1
    prompt = _tokens(_inner(fields.get('prompt', {}), 'prompt'))
    tops = tuple(
      fields.integer(name, 0, 0, MOST_TOP) or 0
      for name in ('topk_prompt_logprobs', 'topk_sample_logprobs')
    )
    last = fields.integer('prompt_logprobs_last_n', None, 1, max(1, len(prompt) - 1))
    scored_from = len(prompt) - (last or len(prompt)) if fields.flag('prompt_logprobs') else None
    if tops[0] and scored_from is None:
      scored_from = 0
    request = self._request(_inner(fields.get('sampling_params', {}), 'sampling_params'), prompt)
    fields.check_all_read()
    requests = [
      Request(**request, sample=i, top_log_probs=max(tops), scored_from=None if i else scored_from)
      for i in range(count)
    ]
    told = lambda answers: wire.sample_response(
      answers, scored_from, (tops[0], tops[1]), len(prompt)
    )
    promise = self._sessions.promise(
      session, f'{id}:{number}', lambda p: self._device.sample(sampler, p, requests, told)
    )
    names = [f'{promise.id}:{i}' for i in range(count)]
    return dict(request_id=promise.id, sample_sequence_ids=names)

  def _request(self, fields: RequestFields, prompt: list[int]) -> dict[str, Any]:
    """Returns the arguments of a Request that all samples have."""
    room = max(1, min(self._max_tokens, self._base.max_length - len(prompt)))
    stop = fields.get('stop')
    is_ids = isinstance(stop, list) and bool(stop) and isinstance(stop[0], int)
    ends = [] if stop == [] else self._base.text_model.ends(chat=True)
    if is_ids:
      ends = [*dict.fromkeys([*fields.integers('stop', MOST_ENDS), *ends])][:MOST_ENDS]
    sampling = Sampling(
      temperature=fields.number('temperature', 1.0, 0, _MOST),
      top_k=max(0, fields.integer('top_k', -1, -1, 1 << 31) or 0),
      top_p=fields.number('top_p', 1.0, 1e-9, 1),
    )
    seed = seed_of(fields.integer('seed', None, 0, (1 << 64) - 1))
    found = dict(
      prompt=prompt, max_tokens=fields.integer('max_tokens', room, 1, self._max_tokens),
      sampling=sampling, seed=seed, ends=ends,
      stop=() if is_ids else fields.texts('stop', _MOST_STOPS), continues=False,
    )  # fmt: skip
    fields.check_all_read()
    return found

  # checks

  def _place(self, fields: RequestFields) -> tuple[Session, int]:
    session = self._sessions.of(fields.get('session_id'))
    return session, fields.integer('model_seq_id', 0, 0, 1 << 31) or 0

  def _check_model(self, name: object) -> None:
    if name != self._model:
      raise ApiError(
        f'base_model {name!r} does not exist: this server has {self._model!r}', 'base_model',
        'model_not_found', 404,
      )  # fmt: skip

  def _check_optimizer(self, fields: RequestFields) -> None:
    config = _inner(fields.get('optimizer_config', {}), 'optimizer_config')
    if (kind := config.get('type', 'adamw')) != 'adamw':
      raise ApiError(f'optimizer_config: type {kind!r} is not supported: use adamw')
    config.check_all_read()


def _adapter(run: TrainingRun) -> TrainedAdapter:
  if run.adapter is None:
    raise ApiError(f'model_id {run.id!r} was not created', 'model_id', 'model_not_found', 404)
  return run.adapter


def _inner(found: Any, name: str) -> RequestFields:
  """Returns the fields of an object within a body."""
  if not isinstance(found, dict):
    raise ApiError(f'{name} must be an object', name)
  return RequestFields(found, ('type',), {})


def _tokens(prompt: RequestFields) -> list[int]:
  """Returns the ids of a prompt, which the engine checks."""
  chunks, ids = prompt.get('chunks', []), list[int]()
  for one in chunks if isinstance(chunks, list) else [chunks]:
    chunk = _inner(one, 'prompt.chunks')
    if 'tokens' not in chunk:
      raise ApiError('prompt has a chunk without tokens: only text is supported', 'prompt')
    ids += chunk.integers('tokens', _MOST_TOKENS)
    chunk.check_all_read()
  prompt.check_all_read()
  return ids
