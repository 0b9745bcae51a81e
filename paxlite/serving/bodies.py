"""Reads the bodies of OpenAI API requests."""

import contextlib
import dataclasses
import functools
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paxlite.chats.conversations import conversation, name_of_tool
from paxlite.chats.sft_formats import texts
from paxlite.config.generation import Sampling
from paxlite.core.errors import UserError
from paxlite.core.fields import Fields
from paxlite.core.json_text import JsonObject
from paxlite.generation.grammar import Grammars
from paxlite.generation.inference import Inference
from paxlite.generation.request import Grammar, Request, check_ids
from paxlite.generation.sampling import MOST_ENDS, MOST_TOP
from paxlite.serving.errors import ApiError
from paxlite.serving.fields import RequestFields
from paxlite.serving.speech import opened

_MOST_PROMPTS, _MOST_STOPS, _MOST_STOP_CHARS = 256, 16, 1000
_MOST_OPENING = 16  # tokens at the end of a prompt that may open the thinking
_COMPLETION_TOKENS = 16  # new tokens of a completion that does not say how many

# They change nothing here, or nothing at all.
_IGNORED = (
  'user', 'metadata', 'store', 'service_tier', 'parallel_tool_calls', 'prompt_cache_key',
  'prompt_cache_retention', 'safety_identifier', 'verbosity',
)  # fmt: skip
_IGNORED_WITHIN = ('name', 'description', 'strict', 'include_obfuscation')
# of a message that is to be continued; templates get all other keys
_CONTINUED = ('prefix', 'partial')
_REFUSED: Mapping[str, Sequence[Any]] = {
  'best_of': (1,), 'suffix': ('',), 'functions': ([],), 'function_call': ('none', 'auto'),
  'modalities': (['text'],), 'audio': (), 'prediction': (), 'reasoning_effort': (),
  'web_search_options': (), 'use_beam_search': (False,), 'prompt_logprobs': (0,),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class RequestLimits:
  """The limits of a client's requests."""

  # the most new tokens of an answer, and those of a chat that does not say how many
  max_tokens: int
  most_answers: int = 128  # the most answers to one request: prompts times n


@dataclasses.dataclass(frozen=True)
class CompletionRequest:
  """The contents of a request."""

  requests: list[Request]  # the requests to the engine, n to each prompt, one prompt after another
  prompts: list[list[int]]  # token ids of each prompt
  n: int  # the number of answers to each prompt
  stream: bool  # whether pieces are sent while the answers are generated
  usage: bool  # whether a stream ends with the numbers of tokens
  # how many of the likeliest tokens are told at each token; None: no log-probabilities
  logprobs: int | None
  echo: bool = False  # whether prompts are part of the answers
  max_tokens: int = 0  # the most new tokens, which may be 0 with echo
  tools: frozenset[str] = frozenset()  # the names of the functions that the answer may call
  thinking: str | None = None  # see Speech
  ids: bool = False  # whether the response has the token ids of the prompts and the answers


class Bodies:
  """Reads the bodies of requests to one model.

  Args:
    inference: The model.
    limits: What a client may ask for.
    special: Whether special tokens may stand in messages; otherwise they are ordinary text there.
  """

  def __init__(self, inference: Inference, limits: RequestLimits, special: bool = False):
    self._inference, self._limits, self._special = inference, limits, special
    self._thinking_inferences = {
      thinking: inference if thinking is None else _with_thinking(inference, thinking)
      for thinking in (None, False, True)
    }
    # the files of the tokenizer may change later
    with contextlib.suppress(ApiError):
      _ = self._grammars
    with contextlib.suppress(UserError):  # a model without a chat template
      for found in self._thinking_inferences.values():
        _ = found.encoding.chat_format

  def completion(self, body: JsonObject) -> CompletionRequest:
    """Reads the body of a request to /v1/completions; raises ApiError."""
    fields = RequestFields(body, _IGNORED, _REFUSED)
    prompts = self._prompts(fields.get('prompt'))
    echo = fields.flag('echo')
    logprobs = fields.integer('logprobs', None, 0, MOST_TOP)
    most = fields.integer('max_tokens', None, 0, self._limits.max_tokens)
    if most == 0 and not echo:
      raise ApiError('max_tokens must be at least 1, or echo must be true', 'max_tokens')
    asked = self._asked(fields, prompts, most, _COMPLETION_TOKENS, logprobs, self._ends(False))
    if echo and logprobs is not None:
      if asked.stream:
        raise ApiError(
          'echo with logprobs cannot be streamed: leave one of them out', 'echo',
          'unsupported_value',
        )  # fmt: skip
      scored = [dataclasses.replace(r, scored_from=0) for r in asked.requests]
      asked = dataclasses.replace(asked, requests=scored)
    return dataclasses.replace(asked, echo=echo)

  def chat(self, body: JsonObject) -> CompletionRequest:
    """Reads the body of a request to /v1/chat/completions; raises ApiError."""
    fields = RequestFields(body, _IGNORED, _REFUSED)
    tools, choice = fields.get('tools'), fields.get('tool_choice', 'auto')
    if choice not in ('auto', 'none'):
      raise ApiError(
        'tool_choice must be "auto" or "none": forcing a call is not supported', 'tool_choice',
        'unsupported_value',
      )  # fmt: skip
    if choice == 'none':
      tools = None
    thinking = self._thinking(fields.get('chat_template_kwargs', {}))
    messages = _with_contents(fields.get('messages'))
    try:
      self._check_length('\n'.join([*texts(messages), *texts(tools)]), 'messages', 2)
      chat = conversation(messages, tools)
      inference = self._thinking_inferences[thinking]
      prompt = inference.encode_chat(chat.messages, chat.tools, self._special)
    except UserError as e:
      raise ApiError(str(e), 'messages') from None
    has_logprobs = fields.flag('logprobs')
    top = fields.integer('top_logprobs', None, 0, MOST_TOP)
    if top is not None and not has_logprobs:
      raise ApiError('top_logprobs needs logprobs: true', 'top_logprobs')
    most = fields.integer('max_completion_tokens', None, 1, self._limits.max_tokens)
    older = fields.integer('max_tokens', None, 1, self._limits.max_tokens)
    room = max(1, min(self._limits.max_tokens, self._inference.max_length - len(prompt)))
    asked = self._asked(
      fields, [prompt], older if most is None else most, room,
      (top or 0) if has_logprobs else None, self._ends(True),
    )  # fmt: skip
    if any(request.grammar is not None for request in asked.requests):
      return asked
    begun = opened(inference.tokenizer.decode_marked(prompt[-_MOST_OPENING:]))
    names = frozenset(map(name_of_tool, chat.tools or ()))
    return dataclasses.replace(asked, tools=names, thinking=begun)

  def _asked(
    self,
    fields: RequestFields,
    prompts: list[list[int]],
    most: int | None,
    usual: int,
    logprobs: int | None,
    ends: Sequence[int],
  ) -> CompletionRequest:
    """Reads the fields of both kinds of requests."""
    n = fields.integer('n', 1, 1, self._limits.most_answers) or 1
    if n * len(prompts) > self._limits.most_answers:
      raise ApiError(
        f'{len(prompts)} prompts with n={n} are more than {self._limits.most_answers} answers', 'n'
      )
    max_tokens = usual if most is None else most
    sampling = _sampling(fields, self._inference.settings.served)
    seed = fields.integer('seed', None, -(1 << 63), (1 << 63) - 1)
    is_seeded = seed is not None
    seed = seed % (1 << 64) if seed is not None else secrets.randbits(63)
    stop = fields.texts('stop', _MOST_STOPS)
    if any(len(text) > _MOST_STOP_CHARS for text in stop):
      raise ApiError(f'a stop text has more than {_MOST_STOP_CHARS} characters', 'stop')
    own_ends = fields.integers('stop_token_ids', MOST_ENDS)
    ends = [*([] if fields.flag('ignore_eos') else ends), *own_ends]
    if len(ends) > MOST_ENDS:
      raise ApiError(
        f"{len(ends)} stop tokens, including the model's; at most {MOST_ENDS} are possible",
        'stop_token_ids',
      )
    self._check_ids(own_ends, 'stop_token_ids')
    bias = self._bias(fields.get('logit_bias', {}))
    least = fields.integer('min_tokens', 0, 0, max_tokens) or 0
    grammar = self._grammar(fields)
    stream, ids = fields.flag('stream'), fields.flag('return_token_ids')
    of_stream = _inner(fields, 'stream_options', {})
    usage = of_stream.flag('include_usage')
    of_stream.check_all_read()
    fields.get('model')
    fields.check_all_read()
    requests: list[Request] = []
    for prompt in prompts:
      if len(prompt) + max_tokens > self._inference.max_length:
        raise ApiError(
          f"This model's maximum context length is {self._inference.max_length} tokens. You "
          f'requested {len(prompt) + max_tokens} tokens ({len(prompt)} in the prompt, {max_tokens} '
          'in the answer)',
          'messages' if fields.get('messages') else 'prompt', 'context_length_exceeded',
        )  # fmt: skip
      for sample in range(n):
        requests.append(
          Request(
            prompt, max_tokens, sampling, seed, sample if is_seeded else len(requests), least, ends,
            stop, bias, grammar(), logprobs or 0,
          )
        )  # fmt: skip
    return CompletionRequest(
      requests, prompts, n, stream, usage, logprobs, max_tokens=max_tokens, ids=ids
    )

  def _prompts(self, given: Any) -> list[list[int]]:
    """Returns the ids of one or several prompts, which are texts or ids."""
    if isinstance(given, str) or (isinstance(given, list) and given and _is_id(given[0])):
      given = [given]
    if not isinstance(given, list) or not given:
      raise ApiError('prompt must be a text, a list of texts, or lists of token ids', 'prompt')
    if len(given) > _MOST_PROMPTS:
      raise ApiError(f'{len(given)} prompts; at most {_MOST_PROMPTS} are possible', 'prompt')
    found = []
    for i, prompt in enumerate(given):
      if not isinstance(prompt, str | list):
        raise ApiError(f'prompt {i} is neither a text nor a list of token ids', 'prompt')
      try:
        if isinstance(prompt, str):
          self._check_length(prompt, 'prompt', 1)
        ids = self._inference.encode(prompt) if isinstance(prompt, str) else prompt
        check_ids(ids, self._inference.experiment.VOCAB_SIZE, f'prompt {i}')
      except UserError as e:
        raise ApiError(str(e), 'prompt') from None
      if not ids:
        raise ApiError(f'prompt {i} is empty, and the model has no start token', 'prompt')
      found.append(ids)
    return found

  def _check_length(self, text: str, name: str, times: int) -> None:
    """Refuses a text if its beginning alone has `times` the model's limit of tokens or more.

    Encoding megabytes takes minutes, in which nothing else is answered.
    """
    most, size = times * self._inference.max_length, 0
    while (size := max(2 * size, 8 * most)) < len(text):
      count = len(self._inference.encode(text[:size]))
      if count > most:
        raise ApiError(
          f"This model's maximum context length is {self._inference.max_length} tokens, and the "
          f'first {size:,} of {len(text):,} characters are {count:,} tokens', name,
          'context_length_exceeded',
        )  # fmt: skip

  def _ends(self, chat: bool) -> list[int]:
    return self._inference.ends(chat)

  def _bias(self, given: Any) -> dict[int, float]:
    try:
      bias = {int(token): float(value) for token, value in given.items()}
    except (AttributeError, TypeError, ValueError):
      raise ApiError('logit_bias must map token ids to numbers', 'logit_bias') from None
    if any(not -100 <= value <= 100 for value in bias.values()):
      raise ApiError('logit_bias: numbers must be from -100 to 100', 'logit_bias')
    self._check_ids([*bias], 'logit_bias')
    return bias

  def _check_ids(self, ids: Sequence[int], name: str) -> None:
    try:
      check_ids(ids, self._inference.experiment.VOCAB_SIZE, name)
    except UserError as e:
      raise ApiError(str(e), name) from None

  def _grammar(self, fields: RequestFields) -> Callable[[], Grammar | None]:
    """Returns the factory of each answer's grammar."""
    form = _inner(fields, 'response_format', {'type': 'text'})
    kind = form.get('type')
    if kind == 'text':
      return lambda: None
    if kind not in ('json_object', 'json_schema'):
      raise ApiError(
        'response_format must have the type text, json_object or json_schema', 'response_format'
      )
    schema = None
    if kind == 'json_schema':
      described = _inner(form, 'json_schema', {})
      schema = described.get('schema')
      if not isinstance(schema, dict):
        raise ApiError('response_format.json_schema.schema must be an object', 'response_format')
      described.check_all_read()
    form.check_all_read()
    try:
      self._grammars.json(schema)  # says what is wrong before a row is taken
    except UserError as e:
      raise ApiError(str(e), 'response_format') from None
    return lambda: self._grammars.json(schema)

  @functools.cached_property
  def _grammars(self) -> Grammars:
    inference = self._inference
    try:
      return Grammars(inference.tokenizer, inference.experiment.VOCAB_SIZE, self._ends(True))
    except UserError as e:
      raise ApiError(str(e), 'response_format', 'unsupported_value') from None

  def _thinking(self, given: Any) -> bool | None:
    known = {'enable_thinking', 'thinking'}
    if not isinstance(given, dict) or set(given) - known:
      raise ApiError('chat_template_kwargs supports only enable_thinking', 'chat_template_kwargs')
    return next((bool(value) for value in given.values()), None)


def _with_thinking(inference: Inference, thinking: bool) -> Inference:
  experiment = inference.experiment.replaced(CHAT_THINKING=thinking)
  return dataclasses.replace(inference, experiment=experiment)


def _sampling(fields: RequestFields, usual: Sampling) -> Sampling:
  top_k = fields.integer('top_k', usual.top_k, -1, 1 << 31) or 0
  return Sampling(
    temperature=fields.number('temperature', usual.temperature, 0, 2),
    top_k=max(0, top_k),  # −1 is vLLM's for all
    top_p=max(fields.number('top_p', usual.top_p, 0, 1), 1e-6),
    repetition_penalty=fields.number('repetition_penalty', usual.repetition_penalty, 0.01, 100),
    min_p=fields.number('min_p', 0.0, 0, 0.999),
    presence_penalty=fields.number('presence_penalty', 0.0, -2, 2),
    frequency_penalty=fields.number('frequency_penalty', 0.0, -2, 2),
  )


def _inner(fields: RequestFields, name: str, default: JsonObject) -> RequestFields:
  """Returns the fields of an object within a request."""
  given = fields.get(name, default)
  if not isinstance(given, dict):
    raise ApiError(f'{name} must be an object', name)
  return RequestFields(given, _IGNORED_WITHIN, {})


def _is_id(x: object) -> bool:
  return isinstance(x, int) and not isinstance(x, bool)


def _with_contents(messages: Any) -> Any:
  """Returns messages whose contents are not null, as those of an assistant may be.

  Raises ApiError if the answer that a message begins is to be continued.
  """
  return [_with_content(m) for m in messages] if isinstance(messages, list) else messages


def _with_content(message: Any) -> Any:
  if not isinstance(message, dict):
    return message
  of_message = Fields(message)
  for key in _CONTINUED:
    if of_message.get(key):
      raise ApiError(f'{key}: an answer cannot be continued', 'messages', 'unsupported_value')
  if of_message.get('role') == 'assistant' and of_message.get('content') is None:
    return {**message, 'content': ''}
  return message
