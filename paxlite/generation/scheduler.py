"""Assigns jobs to rows of the KV cache, and finds rows that hold prefixes of other prompts."""

import collections
from collections.abc import Sequence

import numpy as np

from paxlite.generation.job import Job, Phase

_SHARED_FROM = 16  # tokens that two prompts must have in common, so that they are read once


class Scheduler:
  """Assigns rows of the KV cache to jobs; a row keeps the tokens of its last job.

  Args:
    shares: Whether the beginning of a prompt may be taken from another row.
    looks_ahead: How many tokens after a token what the cache holds of it depends on.

  Attributes:
    shares: The same. A model with states cannot share: a state has seen all tokens of its row.
  """

  def __init__(self, shares: bool, looks_ahead: int = 0):
    self.shares, self._looks_ahead = shares, looks_ahead
    self._jobs: list[Job | None] = []
    self._count = 0  # of jobs that had rows

  def __len__(self) -> int:
    return len(self._jobs)

  @property
  def is_empty(self) -> bool:
    """Whether no row holds tokens that are known."""
    return not any(self._jobs)

  @property
  def busy(self) -> list[Job]:
    """The jobs that have rows and no answer."""
    return [job for job in self._jobs if job is not None and job.answer is None]

  def clear(self, rows: int) -> None:
    """Drops all jobs, and resizes the table to `rows`."""
    self._jobs = [None] * rows

  def admit(self, queue: collections.deque[Job], most: int) -> None:
    """Assigns free rows to the first jobs of a queue, in order.

    A job waits while a row is being read whose prompt begins in the same way.

    Args:
      queue: The jobs that wait.
      most: So many of them may get rows: the cache fits these.
    """
    later: list[Job] = []
    sources = {job.source for job in self.busy if job.source != job.row}
    for _ in range(most):
      free = [row for row in self._free if row not in sources]
      if not free:
        break
      job = queue.popleft()
      source, shared, waits = self._shared(job)
      if waits:
        later.append(job)
        continue
      # a row that others may share is the last one to be taken
      row = next((row for row in free if row != source), free[0])
      if not self._place(job, row, source if shared else row, shared):
        later.append(job)
        break
      self._count += 1
      if job.source != row:
        sources.add(job.source)
      self._jobs[row] = job
    queue.extendleft(reversed(later))

  def _place(self, job: Job, row: int, source: int, shared: int) -> bool:
    """Gives a row to a job, whose first tokens are in `source`; returns whether it has room."""
    job.admit(row, source, shared, self._count)
    return True

  def order(self, rows: int) -> list[int]:
    """Returns which rows are the first ones of a cache of another number of rows.

    Rows that are needed come first, then those that hold the most tokens. Numbers beyond the last
    row stand for empty ones.
    """
    needed = [job.row for job in self.busy] + [job.source for job in self.busy]
    beyond = [len(self)] * rows
    return [*dict.fromkeys([*needed, *reversed(self._free)]), *beyond][:rows]

  def move(self, order: Sequence[int], slots: int) -> None:
    """Reorders the rows, as `order` returns them, and gives each this number of slots."""
    self._jobs = [self._jobs[row] if row < len(self) else None for row in order]
    numbers = {old: new for new, old in enumerate(order)}
    for row, job in enumerate(self._jobs):
      if job is not None:
        job.moved(row, numbers, slots)

  @property
  def _free(self) -> list[int]:
    """The rows without a job that goes on; first those that hold the fewest tokens."""
    free = [row for row, job in enumerate(self._jobs) if job is None or job.answer is not None]
    return sorted(free, key=lambda row: len(job.cached) if (job := self._jobs[row]) else 0)

  def _shared(self, job: Job) -> tuple[int, int, bool]:
    """Returns a row that holds the beginning of a prompt, and how many of its tokens.

    The third result is whether another row, which is being read, will hold more of them.
    """
    row, held, waits = -1, 0, False
    if not self.shares or job.most_shared < _SHARED_FROM:
      return row, held, waits
    for other in filter(None, self._jobs):
      if job.prompt[:_SHARED_FROM] != other.prompt[:_SHARED_FROM]:
        continue  # a quick look at what most prompts differ in
      alike = common(job.prompt, other.known) - self._looks_ahead
      shared = min(alike, job.most_shared)
      now = min(shared, len(other.cached))
      if now >= max(held + 1, _SHARED_FROM):
        row, held, waits = other.row, now, False
      if other.phase is Phase.READING and shared >= held + _SHARED_FROM:
        waits = True
    return row, held, waits


def common(one: Sequence[int], other: Sequence[int]) -> int:
  """Returns how many tokens two texts have in common at their beginning."""
  most = min(len(one), len(other))
  different = np.flatnonzero(np.asarray(one[:most]) != np.asarray(other[:most]))
  return int(different[0]) if len(different) else most
