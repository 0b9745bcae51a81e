"""Results that clients ask for later: each request gets an id, and its result when it is there."""

import asyncio
import collections
import contextlib
import time
from collections.abc import Callable
from typing import Any, Literal

Category = Literal['user', 'server']
_KEPT = 256  # results of a session that its client has fetched, and may fetch once more


class Promise:
  """The result of one request, which a thread makes for an event loop.

  Args:
    id: Its id.
    seconds: The most seconds until there must be a result.

  Attributes:
    deadline: The time at which it is given up.
    result: The body of the response, as JSON or as bytes; None until there is one.
    is_cancelled: Whether the client does not want it any more.
  """

  def __init__(self, id: str, seconds: float):
    self.id = id
    self.deadline = time.monotonic() + seconds
    self._seconds = seconds
    self.result: Any = None
    self.is_cancelled = False
    self._loop, self._done = asyncio.get_running_loop(), asyncio.Event()

  def tell(self, result: Any) -> None:
    """Sets the result, from any thread; a second one is ignored."""
    if self.result is None:
      self.result = result
      with contextlib.suppress(RuntimeError):  # the loop has ended
        self._loop.call_soon_threadsafe(self._done.set)

  def fail(self, error: str, category: Category = 'user') -> None:
    """Sets an error as the result."""
    self.tell({'error': error, 'category': category})

  @property
  def is_late(self) -> bool:
    return time.monotonic() > self.deadline

  def give_up(self) -> None:
    """Sets the error that it was cancelled, or took too long."""
    late = f'the request was not complete after {self._seconds:g} seconds'
    self.fail('the request was cancelled' if self.is_cancelled else late, 'server')

  async def wait(self, seconds: float) -> bool:
    """Waits for the result; returns whether there is one."""
    with contextlib.suppress(TimeoutError):
      async with asyncio.timeout(seconds):
        await self._done.wait()
    return self.result is not None


class Promises:
  """The promises of one session."""

  def __init__(self) -> None:
    self._open: dict[str, Promise] = {}
    self._fetched: collections.OrderedDict[str, Promise] = collections.OrderedDict()

  def __len__(self) -> int:
    """The number of promises whose results were not fetched."""
    return len(self._open)

  def get(self, id: str) -> Promise | None:
    return self._open.get(id) or self._fetched.get(id)

  def made(self, id: str, seconds: float, begin: Callable[[Promise], None]) -> Promise:
    """Returns the promise of an id, which is made, and begun, if there is none yet.

    A client that has lost the response to a request sends it again, with the same id.
    """
    if (known := self.get(id)) is not None:
      return known
    promise = self._open[id] = Promise(id, seconds)
    begin(promise)
    return promise

  def fetched(self, promise: Promise) -> None:
    """Notes that a client was sent the result."""
    if self._open.pop(promise.id, None):
      self._fetched[promise.id] = promise
      while len(self._fetched) > _KEPT:
        self._fetched.popitem(last=False)

  def cancel_all(self) -> None:
    """Cancels what has no result yet."""
    for promise in self._open.values():
      promise.is_cancelled = True
