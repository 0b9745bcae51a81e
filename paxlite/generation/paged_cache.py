"""A KV cache whose rows share pages: rows take pages as they grow.

Where pages run out, what ended answers have left goes first, and then the youngest answers wait
with a copy of their rows in the host's memory. So each answer is the one that it would be with room
for all.
"""

import collections
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from paxlite.generation.cache import TABLE, Pages
from paxlite.generation.cache_pool import KVCachePool
from paxlite.generation.job import Job
from paxlite.generation.page_pool import PagePool
from paxlite.generation.programs import State
from paxlite.generation.scheduler import Scheduler
from paxlite.layers.attention.paged_vectors import NO_PAGE


class PagedScheduler(Scheduler):
  """Assigns rows and pages to jobs; the pages of a job that has ended stay until they are needed.

  A job shares the full pages of another one whose prompt begins in the same way.

  Args:
    pages: The pages of the cache.
    shares: See Scheduler.
    looks_ahead: See Scheduler.
  """

  def __init__(self, pages: Pages, shares: bool, looks_ahead: int = 0):
    super().__init__(shares, looks_ahead)
    self.pages, self._size = PagePool(pages), pages.size

  def clear(self, rows: int) -> None:
    for job in filter(None, self._jobs):
      job.pages.clear()
    self.pages.reset()
    super().clear(rows)

  def move(self, order: Sequence[int], slots: int) -> None:
    for row in {*range(len(self))} - {*order}:
      self._drop(self._jobs[row])
    super().move(order, slots)

  def fitting(self, waiting: Sequence[Job]) -> list[Job]:
    """Returns the first jobs for which there will be pages."""
    busy = self.busy
    free = self.pages.num_pages - len({page for job in busy for page in job.pages})
    found: list[Job] = []
    for job in waiting:
      shared = self._shared(job)[1]
      free -= self.pages.missing([], self._first_tokens(job)) - shared // self._size
      if free < 0 and (busy or found):
        break
      found.append(job)
    return found

  def grow(self, held: list[int], tokens: int, spare: int = 0) -> bool:
    """Gives a row pages for so many tokens, if `spare` ones stay free; returns whether it did."""
    missing = self.pages.missing(held, tokens)
    while missing + spare > self.pages.num_free and missing:
      ended = (job for row in self._free if (job := self._jobs[row]) is not None)
      dropped = next(ended, None)
      if dropped is None:
        return False
      self._drop(dropped)
    return self.pages.grow(held, tokens)

  def pause(self, job: Job, saved: Any) -> None:
    """Takes the row and the pages of a job, with a copy of what they hold."""
    job.pause(saved)
    self._drop(job)

  def _place(self, job: Job, row: int, source: int, shared: int) -> bool:
    other = self._jobs[source]
    kept = self.pages.shared(other.pages, shared) if shared and other is not None else []
    self._drop(self._jobs[row])
    if not self.grow(kept, self._first_tokens(job), spare=len(self.busy)):
      self.pages.release(kept)
      return False
    num_kept = min(shared // self._size, len(kept))
    job.pages = kept
    if job.saved is None:
      super()._place(job, row, row, num_kept * self._size)
    else:
      job.resume(row)
    return True

  def _first_tokens(self, job: Job) -> int:
    """Returns the tokens that a job needs pages for when it gets a row.

    One that comes back has room to write some, so that it is not paused at once.
    """
    soon = 1 if job.saved is None else self._size
    return min(len(job.known) + soon, len(job.prompt) + job.request.max_tokens)

  def _drop(self, job: Job | None) -> None:
    if job is not None:
      self.pages.release(job.pages)
      self._jobs[job.row] = None


class PagedCachePool(KVCachePool):
  """The state of all rows on the devices, of which the tokens lie in pages; see KVCachePool."""

  _scheduler: PagedScheduler

  def admit(self, queue: collections.deque[Job], most: int, may_shrink: bool) -> None:
    fitting = self._scheduler.fitting([*queue][:most])
    super().admit(queue, len(fitting), may_shrink)
    for job in self._scheduler.busy:
      if job.saved is not None:
        assert self.state is not None
        width, saved = job.saved
        if self.tables and saved.rows.options.tables is None:
          saved = saved._replace(rows=self._with_tables(saved.rows, 1))
        self.state = self._programs.restore(self.state, saved, *self._place(job, width))
        job.saved = None

  def prepare(self, jobs: Sequence[Job]) -> None:
    assert self.state is not None
    table = np.full((len(self._scheduler), self._width), NO_PAGE, np.int32)
    for job in jobs:
      table[job.row] = self._place(job, self._width)[1]
    self.state = self.state._replace(cache={**self.state.cache, TABLE: self._placed(table)})

  def with_room(
    self, jobs: Sequence[Job], new: int, queue: collections.deque[Job]
  ) -> Sequence[Job]:
    left = collections.deque(sorted(jobs, key=lambda job: job.number))
    ready: list[Job] = []
    while left:
      job = left.popleft()
      most = len(job.prompt) + job.request.max_tokens
      while (
        not (grown := self._scheduler.grow(job.pages, min(len(job.known) + new, most))) and left
      ):
        youngest, width = left.pop(), self._width  # it may grow before the row comes back
        saved = jax.device_get(self._programs.save(self.state, *self._place(youngest, width)))
        self._scheduler.pause(youngest, (width, saved))
        queue.appendleft(youngest)
      if grown:
        ready.append(job)
    return ready

  def _resized(self, state: State, order: Sequence[int], slots: int) -> State:
    """Returns a state with the same pages, of which `prepare` fills the table."""
    is_shared = self._programs.layout.is_shared
    pages = {path: x for path, x in state.cache.items() if is_shared(path)}
    others = {path: x for path, x in state.cache.items() if path not in {*pages, TABLE}}
    new = super()._resized(state._replace(cache=others), order, slots)
    table = self._placed(np.full((len(order), self._width_of(slots)), NO_PAGE, np.int32))
    return new._replace(cache={**new.cache, **pages, TABLE: table})

  def _place(self, job: Job, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the row of a job, [1], and its pages, [width]."""
    pages = np.full(width, NO_PAGE, np.int32)
    held = job.pages[:width]
    pages[: len(held)] = held
    return np.array([job.row], np.int32), pages

  @property
  def _width(self) -> int:
    """The most pages of a row, W."""
    return self._width_of(self.slots)

  def _width_of(self, slots: int) -> int:
    pages = self._programs.layout.pages
    assert pages is not None
    return -(-slots // pages.size)
