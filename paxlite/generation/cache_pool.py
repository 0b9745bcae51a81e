"""The KV cache on the devices, which grows with the requests."""

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from paxlite.generation import options
from paxlite.generation.job import Job
from paxlite.generation.programs import DecodeRows, Programs, State
from paxlite.generation.scheduler import Scheduler

_SHRINK_FOR = 64  # tokens that are left, for which a smaller program is worth its compilation


class Sizes(NamedTuple):
  """Which sizes a cache may have; each needs programs."""

  slots: int = 128  # the fewest slots of a row
  slot_growth: int = 2  # by which factor their number grows
  # By which factor the number of rows grows, from 1. A CPU takes longer for more rows; elsewhere
  # fewer programs are worth more.
  row_growth: int = 4
  most_slots: int = 1 << 62  # the most slots of a row


def steady_sizes(
  max_length: int, most_rows: int, is_cpu: bool, size: Callable[[int], int]
) -> Sizes:
  """Returns few sizes, of which the first one has as many slots as cost hardly any time.

  Args:
    max_length: The most tokens of a row.
    is_cpu: Whether it is for a CPU.
    size: Returns the bytes of a cache of `most_rows` rows with so many slots.
  """
  most = max(128, power(2, max_length))
  slots, free = min(512, most), 1 << 26 if is_cpu else 1 << 31
  while slots < most and size(min(4 * slots, most)) <= free:
    slots = min(4 * slots, most)
  return Sizes(slots, 4, 8 if is_cpu else max(2, most_rows), most)


class KVCachePool:
  """The state of all rows on the devices.

  Args:
    programs: The programs that change it.
    scheduler: Knows which jobs have rows.
    vocab_size: V.
    multiple: The mesh can divide numbers of rows that are multiples of this.
    slots: The pool always has `most_rows` rows of so many slots; None: it grows.
    sizes: How it grows.
    tables: Whether the rows have tables from the start.

  Attributes:
    state: The state; None: there is no cache. A program that overwrites it must set it again.
    tables: Whether the rows have tables; see sampling.Tables.
    least_rows: It has as many rows as for so many answers, even if there are fewer.
  """

  def __init__(
    self,
    programs: Programs,
    scheduler: Scheduler,
    vocab_size: int,
    most_rows: int,
    multiple: int,
    slots: int | None,
    sizes: Sizes,
    tables: bool = False,
  ):
    self.state: State | None = None
    self.tables, self.least_rows = tables, 1
    self._programs, self._scheduler, self._vocab_size = programs, scheduler, vocab_size
    self._most_rows, self._multiple, self._fixed_slots = most_rows, multiple, slots
    self._slots, self._sizes = 0, sizes

  def clear(self) -> None:
    """Frees the memory."""
    self.state, self._slots = None, 0

  @property
  def slots(self) -> int:
    """The number of slots of each row."""
    return self._slots

  def admit(self, queue: collections.deque[Job], most: int, may_shrink: bool) -> None:
    """Gives rows to the first jobs of a queue.

    Args:
      queue: The jobs that wait.
      most: So many of them may get rows.
      may_shrink: See `fit`.
    """
    waiting = [*queue][:most]
    self.fit(waiting, may_shrink)
    self._scheduler.admit(queue, len(waiting))

  def prepare(self, jobs: Sequence[Job]) -> None:
    """Is called before each program, with the jobs whose rows get tokens."""

  def with_room(
    self, jobs: Sequence[Job], new: int, queue: collections.deque[Job]
  ) -> Sequence[Job]:
    """Returns the jobs that have room for `new` more tokens.

    Args:
      jobs: The jobs that write.
      new: The most tokens of each that the next call writes.
      queue: Gets the jobs that lose their rows so that others have room.
    """
    return jobs

  def fit(self, waiting: Sequence[Job], may_shrink: bool) -> None:
    """Resizes the pool for the jobs that have rows and for these.

    Args:
      waiting: Jobs that will get rows.
      may_shrink: Whether it may get smaller.
    """
    busy = self._scheduler.busy
    tables = self.tables or options.needs_tables([job.request for job in waiting])
    if self._fixed_slots is not None:
      self._set_size(self._most_rows, self._fixed_slots, tables)
      return
    rows = self._level(len(busy) + len(waiting))
    longest = max((job.slots for job in [*waiting, *busy]), default=0)
    fewest = self._sizes.slots
    slots = fewest * power(self._sizes.slot_growth, -(-longest // fewest))
    slots = min(slots, self._sizes.most_slots)
    if not may_shrink:
      rows = max(rows, len(self._scheduler))
    if not may_shrink or 4 * slots > self._slots:
      slots = max(slots, self._slots)
    self._set_size(rows, slots, tables)

  def shrink(self) -> None:
    """Leaves out rows when few answers are left, as a CPU takes longer for more rows.

    Whether it does depends on the requests alone, and not on what was compiled before: a run that
    continues generates by the same programs.
    """
    busy = self._scheduler.busy
    rows = self._level(len(busy))
    if rows >= len(self._scheduler) or self._fixed_slots is not None:
      return
    if max(job.num_left for job in busy) >= _SHRINK_FOR:
      self._set_size(rows, self._slots, self.tables)

  def shapes(self, rows: int, slots: int) -> State:
    """Returns the shapes of a state."""
    layout = self._programs.layout
    like = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout.everywhere)
    cache: Any = layout.abstract(rows, slots)
    return State(cache, jax.tree.map(like, self._no_rows(rows, self.tables)))

  @property
  def row_levels(self) -> list[int]:
    """The numbers of rows that there may be."""
    return sorted({self._level(count) for count in range(1, self._most_rows + 1)})

  def _level(self, count: int) -> int:
    """Returns the number of rows for `count` answers."""
    needed = power(self._sizes.row_growth, max(count, self.least_rows))
    return min(self._whole(needed), self._most_rows)

  def _whole(self, rows: int) -> int:
    return -(-rows // self._multiple) * self._multiple

  def _set_size(self, rows: int, slots: int, tables: bool) -> None:
    """Makes a cache of this size, which keeps what it can of the tokens."""
    if self.state and (rows, slots, tables) == (len(self._scheduler), self._slots, self.tables):
      return
    if self.state is None or self._scheduler.is_empty:
      self.state = None  # both at a time may be too much
      self.state = self._empty(rows, slots, tables)
      self._scheduler.clear(rows)
    else:
      order, state = self._scheduler.order(rows), self.state
      if tables != self.tables:
        state = state._replace(rows=self._with_tables(state.rows, len(self._scheduler)))
      self.state = self._resized(state, order, slots)
      self._scheduler.move(order, slots)
    self._slots, self.tables = slots, tables

  def _resized(self, state: State, order: Sequence[int], slots: int) -> State:
    """Returns these rows of a state, with `slots` slots each."""
    return self._programs.resize(state, np.array(order, np.int32), slots)

  def _empty(self, rows: int, slots: int, tables: bool) -> State:
    cache = self._programs.layout.empty(rows, slots)
    return State(cache, jax.tree.map(self._placed, self._no_rows(rows, tables)))

  def _placed(self, x: np.ndarray) -> jax.Array:
    """Returns an array of which each device has a copy."""
    everywhere = self._programs.layout.everywhere
    if everywhere is None:
      return jnp.asarray(x)
    # device_put would compare the processes on all their devices
    return jax.make_array_from_callback(x.shape, everywhere, x.__getitem__)

  def _no_rows(self, rows: int, tables: bool) -> DecodeRows:
    nothing = options.choices([None] * rows, tables, self._vocab_size)
    zeros: Any = lambda: np.zeros(rows, np.int32)
    is_done: Any = np.ones(rows, bool)
    return DecodeRows(zeros(), zeros(), zeros(), is_done, nothing, self._programs.no_drafts(rows))

  def _with_tables(self, rows: DecodeRows, count: int) -> DecodeRows:
    """Returns so many rows with tables, which none of them has needed so far."""
    tables = options.choices([None] * count, True, self._vocab_size).tables
    return dataclasses.replace(rows, options=dataclasses.replace(rows.options, tables=tables))


def power(base: int, least: int) -> int:
  """Returns the smallest power of `base` that is not below `least`."""
  found = 1
  while found < least:
    found *= base
  return found
