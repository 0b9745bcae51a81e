"""The sessions of clients: their training runs, their samplers, and the order of their requests."""

import asyncio
import collections
import random
import secrets
import time
from collections.abc import Callable
from typing import Any

from paxlite.core.json_text import JsonObject
from paxlite.serving import errors
from paxlite.serving.errors import ApiError
from paxlite.training_api.device import Device, SampledAdapter
from paxlite.training_api.promises import Promise, Promises
from paxlite.training_api.trained_adapter import TrainedAdapter

_MOST_RUNS = 64  # training clients of all sessions
_MOST_SAMPLERS = 16  # of a session that are saved nowhere: a step of RL makes one
_LEAST_SILENCE = 30.0  # seconds; clients send a heartbeat every 10
_GAP_SECONDS = 10.0  # that a request waits for one with a smaller number


class TrainingRun:
  """The run of one training client. Its requests are computed in the order of their numbers.

  The parts of one batch arrive in any order. A number whose request never reached the server, as
  when the connection has failed for good, is skipped after a while.

  Args:
    id: Its id, which the client derives too.
    metadata: What the client says of it.
  """

  def __init__(self, id: str, metadata: JsonObject):
    self.id, self.metadata = id, metadata
    self.adapter: TrainedAdapter | None = None  # the device makes it
    self._next = 1
    self._waiting: dict[int, Callable[[], None]] = {}

  def in_turn(self, number: int, begin: Callable[[], None]) -> None:
    """Calls `begin` after those of all smaller numbers."""
    if number < self._next:  # it was skipped
      begin()
      return
    self._waiting[number] = begin
    self._go_on()
    if self._waiting:
      asyncio.get_running_loop().call_later(_GAP_SECONDS, self._skip, min(self._waiting))

  def _go_on(self) -> None:
    while self._next in self._waiting:
      begin = self._waiting.pop(self._next)
      self._next += 1
      begin()

  def _skip(self, number: int) -> None:
    if number in self._waiting:
      self._next = number
      self._go_on()


class Session:
  """What belongs to one ServiceClient.

  Attributes:
    promises: Its results.
    runs: Its training runs by id.
    samplers: Its samplers by id.
  """

  def __init__(self) -> None:
    self.id = secrets.token_hex(16)
    self.seen = time.monotonic()
    self.promises = Promises()
    self.runs: dict[str, TrainingRun] = {}
    self.samplers: collections.OrderedDict[str, SampledAdapter | None] = collections.OrderedDict()

  def add_sampler(self, number: int, sampler: SampledAdapter) -> str:
    """Returns the id of a sampler; of those that are saved nowhere, the oldest one is forgotten."""
    id = f'{self.id}:sample:{number}'
    if id in self.samplers:  # the client has sent the request twice
      return id
    self.samplers[id] = sampler
    held = [k for k, s in self.samplers.items() if s is not None and s.is_held]
    for old in held[:-_MOST_SAMPLERS]:
      self.samplers[old] = None
    return id


class Sessions:
  """All sessions, and the limits that they share.

  Args:
    device: Computes for them.
    most_waiting: The most requests whose results were not fetched.
    seconds: The most seconds of a request. A session is dropped if its client sends nothing for
      that long, at least 30.
  """

  def __init__(self, device: Device, most_waiting: int, seconds: float):
    self.device, self.seconds = device, seconds
    self._most_waiting, self._silence = most_waiting, max(seconds, _LEAST_SILENCE)
    self._sessions: dict[str, Session] = {}

  @property
  def count(self) -> int:
    """The number of requests whose results were not fetched."""
    return sum(len(session.promises) for session in self._sessions.values())

  def new(self) -> Session:
    session = Session()
    self._sessions[session.id] = session
    return session

  def of(self, id: object) -> Session:
    """Returns the session of an id, or of one that begins with it; drops those without a client.

    Raises:
      ApiError: There is none.
    """
    now = time.monotonic()
    for session in [*self._sessions.values()]:
      if now - session.seen > self._silence:
        self.end(session)
    found = self._sessions.get(str(id).partition(':')[0])
    if found is None:
      raise ApiError(
        f'session {str(id).partition(":")[0]!r} does not exist: it has ended, its client was '
        f'silent for {self._silence:g} seconds, or the server was started again: make a new '
        'ServiceClient',
        code='session_not_found', status=404,
      )  # fmt: skip
    found.seen = now
    return found

  def end(self, session: Session) -> None:
    """Drops a session with all that is not saved."""
    session.promises.cancel_all()
    self._sessions.pop(session.id, None)

  def run_of(self, id: object) -> tuple[Session, TrainingRun]:
    """Returns the run of an id and its session; raises ApiError if there is none."""
    session = self.of(id)
    if (run := session.runs.get(str(id))) is None:
      raise ApiError(f'model_id {str(id)!r} does not exist', 'model_id', 'model_not_found', 404)
    return session, run

  def new_run(self, session: Session, number: int, metadata: JsonObject) -> TrainingRun:
    """Returns a run of a session; the same one if there is one of this number."""
    id = f'{session.id}:train:{number}'
    if id not in session.runs:
      if sum(len(s.runs) for s in self._sessions.values()) >= _MOST_RUNS:
        raise ApiError(
          f'{_MOST_RUNS} training clients are open, the most of this server: close some '
          'ServiceClients', code='too_many_models', status=403,
        )  # fmt: skip
      session.runs[id] = TrainingRun(id, metadata)
    return session.runs[id]

  def sampler_of(self, id: object) -> tuple[Session, SampledAdapter]:
    """Returns the sampler of an id and its session; raises ApiError if there is none."""
    session = self.of(id)
    if str(id) not in session.samplers:
      raise ApiError(f'sampler {str(id)!r} does not exist', code='sampler_not_found', status=404)
    sampler = session.samplers[str(id)]
    if sampler is None:
      raise ApiError(
        f'the weights of sampler {str(id)!r} were dropped: {_MOST_SAMPLERS} newer ones were made. '
        'save_weights_for_sampler(name) keeps weights', code='sampler_dropped', status=404,
      )  # fmt: skip
    return session, sampler

  def promise(self, session: Session, id: str, begin: Callable[[Promise], None]) -> Promise:
    """Returns the promise of a request, which begins unless it was sent before.

    Raises:
      ApiError: Too many wait. The client sends it again later.
    """
    if session.promises.get(id) is None and self.count >= self._most_waiting:
      raise errors.busy()
    return session.promises.made(id, self.seconds, begin)

  def in_turn(
    self,
    id: object,
    number: int | None,
    compute: Callable[[TrainedAdapter], Any],
    on_error: Callable[[TrainedAdapter, str], None] = lambda adapter, error: None,
  ) -> Promise:
    """Returns the promise of a request of a training run, which is computed in its turn.

    Args:
      id: The id of the run.
      number: The number of the request.
      compute: Returns the result.
      on_error: Is called on the device if there is no result.
    """
    session, run = self.run_of(id)
    if number is None or number < 1:
      raise ApiError('seq_id must be at least 1', 'seq_id')

    def adapter() -> TrainedAdapter:
      if run.adapter is None:
        raise ApiError(f'model_id {run.id!r} was not created')
      return run.adapter

    def begin(promise: Promise) -> None:
      run.in_turn(
        number,
        lambda: self.device.submit(
          promise,
          lambda: compute(adapter()),
          lambda error: on_error(run.adapter, error) if run.adapter else None,
        ),
      )

    return self.promise(session, f'{run.id}:{number}', begin)


def seed_of(value: int | None) -> int:
  """Returns a seed, or a random one where a client has none."""
  return random.SystemRandom().randrange(1 << 31) if value is None else value
