"""The thread that runs an engine for the requests of a server."""

import asyncio
import contextlib
import dataclasses
import logging
import queue
import threading
from collections.abc import AsyncIterator, Sequence

from paxlite.generation.engine import Engine
from paxlite.generation.job import Job
from paxlite.generation.request import Completion, Request

log = logging.getLogger('paxlite')

_STEPS = 4  # tokens between two looks at new requests


class BusyError(Exception):
  """Too many requests are waiting."""


@dataclasses.dataclass(frozen=True)
class Progress:
  """The new part of an answer."""

  parts: Sequence[str] = ()  # parts of its text that later tokens cannot change
  answer: Completion | None = None  # the whole answer, if it is complete
  error: Exception | None = None  # why there will be none

  @property
  def is_last(self) -> bool:
    return self.answer is not None or self.error is not None


class Ticket:
  """A request that the thread processes for an event loop."""

  def __init__(self, request: Request):
    self.request = request
    self.job: Job | None = None
    self._loop = asyncio.get_running_loop()
    self._news: asyncio.Queue[Progress] = asyncio.Queue()

  def tell(self, progress: Progress) -> None:
    """Passes progress on, from any thread."""
    with contextlib.suppress(RuntimeError):  # the loop has ended, and with it everyone who waits
      self._loop.call_soon_threadsafe(self._news.put_nowait, progress)

  async def news(self) -> AsyncIterator[Progress]:
    """Yields the progress, the last of which has the answer.

    Raises:
      Exception: The engine has failed.
    """
    while True:
      progress = await self._news.get()
      if progress.error is not None:
        raise progress.error
      yield progress
      if progress.answer is not None:
        return


class Worker:
  """Runs an engine in its own thread.

  Args:
    engine: The engine, which nothing else uses meanwhile.
    most_waiting: The most requests that wait for a row.
  """

  def __init__(self, engine: Engine, most_waiting: int):
    self.engine = engine
    self._most_waiting = most_waiting
    self._calls: queue.SimpleQueue[tuple[str, Ticket] | None] = queue.SimpleQueue()
    self._tickets: list[Ticket] = []
    self._count = 0  # of tickets without an answer
    self._lock = threading.Lock()
    self._thread = threading.Thread(target=self._run, name='engine', daemon=True)

  def start(self) -> None:
    """Starts the thread."""
    self._thread.start()

  def stop(self) -> None:
    """Ends the thread after the present step; answers that are not complete fail."""
    self._calls.put(None)
    self._thread.join()

  @property
  def count(self) -> int:
    """The number of requests without an answer."""
    return self._count

  def submit(self, requests: Sequence[Request]) -> list[Ticket]:
    """Queues requests; raises BusyError if too many wait."""
    with self._lock:
      if self._count + len(requests) > self.engine.most_rows + self._most_waiting:
        raise BusyError
      self._count += len(requests)
    tickets = [Ticket(request) for request in requests]
    for ticket in tickets:
      self._calls.put(('add', ticket))
    return tickets

  def cancel(self, ticket: Ticket) -> None:
    """Ends a request that no client waits for."""
    self._calls.put(('cancel', ticket))

  def _run(self) -> None:
    while self._take():
      try:
        self.engine.step(most=_STEPS)
      except Exception as e:  # the next requests may go well
        log.exception('the engine has failed')
        self.engine.reset()
        failed = [(ticket, Progress(error=e)) for ticket in self._tickets]
        self._tell(failed)
        continue
      self._tell([(ticket, _news(ticket.job)) for ticket in self._tickets if ticket.job])
    for ticket in self._tickets:
      ticket.tell(Progress(error=ConnectionAbortedError('the server ends')))

  def _take(self) -> bool:
    """Carries out what was asked of the thread, and waits if there is nothing to do.

    Returns:
      Whether the thread goes on.
    """
    while not (self._tickets and self._calls.empty()):
      call = self._calls.get()
      if call is None:
        return False
      what, ticket = call
      if what == 'add':
        try:
          ticket.job = self.engine.add(ticket.request)
          self._tickets.append(ticket)
        except Exception as e:
          self._tell([(ticket, Progress(error=e))])
      elif ticket.job is not None and ticket.job.answer is None:
        self.engine.cancel(ticket.job)
        self._forget([ticket])
    return True

  def _tell(self, news: Sequence[tuple[Ticket, Progress]]) -> None:
    """Passes news on, after making room for the next request if an answer is complete."""
    done = [ticket for ticket, progress in news if progress.is_last]
    for ticket in done:
      if ticket.job is not None:
        self.engine.cancel(ticket.job)
    self._forget(done)
    for ticket, progress in news:
      if progress.parts or progress.is_last:
        ticket.tell(progress)

  def _forget(self, tickets: Sequence[Ticket]) -> None:
    gone = {id(ticket) for ticket in tickets}
    self._tickets = [ticket for ticket in self._tickets if id(ticket) not in gone]
    with self._lock:
      self._count -= len(gone)


def _news(job: Job) -> Progress:
  """Returns the news of a job; an error concerns only its request."""
  parts: Sequence[str] = ()
  try:
    parts = job.parts()
  except Exception as e:
    job.fail(e)
  if job.error is not None:
    return Progress(error=job.error)
  return Progress(parts, job.answer)
