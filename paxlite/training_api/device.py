"""The thread that computes for all clients, one request after another."""

import collections
import concurrent.futures
import logging
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from paxlite.core.errors import UserError
from paxlite.core.json_text import JsonObject
from paxlite.generation.engine import Engine
from paxlite.generation.job import Job
from paxlite.generation.request import Completion, Request
from paxlite.serving.errors import ApiError
from paxlite.training_api.adapted_model import AdaptedModel, AdapterKind, Arrays, BaseModel, nested
from paxlite.training_api.promises import Promise
from paxlite.training_api.saved_adapters import SavedAdapters
from paxlite.training_api.trained_adapter import TrainedAdapter

log = logging.getLogger('paxlite')

_STEPS = 4  # tokens between two looks at the clock
_FAILED = 'the server has failed to compute this request; its log says why'


Told = Callable[[Sequence[Completion]], Any]
Waiting = tuple[Promise, Sequence[Request], Told]


class SampledAdapter:
  """Weights that clients sample from, and the requests that wait for them.

  Args:
    model: The model with factors; None: the base.
    factors: The factors, which never change.
    path: Where they are saved; they are read for each use. '': nowhere.
    is_held: Whether they are in memory alone.
  """

  def __init__(
    self,
    model: AdaptedModel | None = None,
    factors: Arrays | None = None,
    path: str = '',
    is_held: bool = False,
  ):
    self.model, self.factors, self.path, self.is_held = model, factors, path, is_held
    self.waiting: collections.deque[Waiting] = collections.deque()  # two threads use it


class Device:
  """Computes for all clients.

  Args:
    base: The base model.
    folder: Where adapters are saved.
    most_rows: The most sequences that are generated at a time; None: DECODE_BATCH_SIZE.
  """

  def __init__(self, base: BaseModel, folder: pathlib.Path, most_rows: int | None):
    self.base = base
    self.saved = SavedAdapters(folder, base.fingerprint)
    self._most_rows = most_rows
    self._models: dict[AdapterKind, AdaptedModel] = {}
    self._engines: dict[AdapterKind | None, Engine] = {}
    self._thread = concurrent.futures.ThreadPoolExecutor(1, 'device')

  def stop(self) -> None:
    """Ends after the present request."""
    self._thread.shutdown(cancel_futures=True)

  def submit(
    self,
    promise: Promise,
    compute: Callable[[], Any],
    on_error: Callable[[str], None] = lambda error: None,
  ) -> None:
    """Queues a computation, which makes the result of a promise.

    Args:
      promise: The promise.
      compute: Returns the result; a UserError is told to the client.
      on_error: Is called with the error if there is no result.
    """

    def run() -> None:
      if promise.is_cancelled or promise.is_late:
        promise.give_up()
      else:
        try:
          promise.tell(compute())
          return
        except (UserError, ApiError) as e:
          promise.fail(str(e))
        except Exception:  # the next request may go well
          log.exception('a request of a training client has failed')
          promise.fail(_FAILED, 'server')
      on_error(promise.result['error'])

    self._thread.submit(run)

  def model(self, kind: AdapterKind) -> AdaptedModel:
    """Returns the model with factors of a kind; clients of one kind share its programs."""
    if kind not in self._models:
      self._models[kind] = AdaptedModel(self.base, kind)
    return self._models[kind]

  def loaded(self, path: str, with_moments: bool) -> TrainedAdapter:
    """Returns a new adapter with saved factors, and its saved moments if they are wanted."""
    model = self.model(self.saved.kind(path))
    return TrainedAdapter(model, *self.saved.load(path, model, with_moments))

  def save(
    self,
    adapter: TrainedAdapter | SampledAdapter,
    path: str,
    overwrite: bool,
    metadata: JsonObject,
  ) -> None:
    """Saves an adapter; one that is trained with its moments."""
    moments = adapter.moments if isinstance(adapter, TrainedAdapter) else None
    assert adapter.model is not None
    assert adapter.factors is not None
    self.saved.save(path, adapter.model, adapter.factors, moments, overwrite, metadata)

  def sample(
    self,
    sampled: SampledAdapter,
    promise: Promise,
    requests: Sequence[Request],
    told: Told,
  ) -> None:
    """Queues requests to one sampler; those that wait for the same one are generated together.

    Args:
      sampled: The weights.
      promise: Gets the result.
      requests: The requests.
      told: Returns the result for the answers.
    """
    sampled.waiting.append((promise, requests, told))
    self._thread.submit(self._generate, sampled)

  def _generate(self, sampled: SampledAdapter) -> None:
    waiting: list[Waiting] = []
    while sampled.waiting:
      waiting.append(sampled.waiting.popleft())
    if not waiting:
      return
    engine, jobs = None, list[tuple[Promise, list[Job], Told]]()
    try:
      engine = self._engine(sampled)
      for promise, requests, told in waiting:
        try:
          for request in requests:
            engine.check(request)
          jobs.append((promise, [engine.add(request) for request in requests], told))
        except UserError as e:
          promise.fail(str(e))
      while jobs := [entry for entry in jobs if not _finished(engine, *entry)]:
        engine.step(most=_STEPS)
    except Exception as e:
      if not isinstance(e, UserError):
        log.exception('sampling has failed')
      for promise, *_ in waiting:
        promise.fail(*((str(e),) if isinstance(e, UserError) else (_FAILED, 'server')))
      if engine is not None:
        engine.reset()
    finally:
      if engine is not None:
        engine.params = None  # room for gradients

  def _engine(self, sampled: SampledAdapter) -> Engine:
    """Returns the engine of weights, which has them as its parameters."""
    model, factors = sampled.model, sampled.factors
    if sampled.path:
      model = self.model(self.saved.kind(sampled.path))
      factors, _ = self.saved.load(sampled.path, model, False)
    kind = None if model is None else model.kind
    if kind not in self._engines:
      texts = self.base.text_model if model is None else model.text_model
      self._engines[kind] = texts.engine(most_rows=self._most_rows)
    engine = self._engines[kind]
    engine.params = nested(self.base.params, factors or {})
    return engine


def _finished(engine: Engine, promise: Promise, jobs: Sequence[Job], told: Told) -> bool:
  """Returns whether a promise has its result now, or is given up."""
  if promise.is_late or promise.is_cancelled:
    for job in jobs:
      engine.cancel(job)
    promise.give_up()
    return True
  if any(job.answer is None for job in jobs):
    return False
  errors = [str(job.error) for job in jobs if job.error is not None]
  if errors:
    promise.fail(errors[0])
  else:
    promise.tell(told([job.answer for job in jobs if job.answer is not None]))
  return True
