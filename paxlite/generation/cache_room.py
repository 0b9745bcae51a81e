"""The cache on the devices, which grows with what is asked for."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paxlite.generation import options
from paxlite.generation.job import Job
from paxlite.generation.programs import Programs, Rows, State
from paxlite.generation.row_table import RowTable

_FEWEST_SLOTS = 128
_SHRINK_FOR = 64  # tokens that are left, for which a smaller program is worth its compilation


class CacheRoom:
  """The state of all rows on the devices.

  Args:
    programs: The programs that change it.
    rows: The jobs of the rows.
    vocab_size: V.
    most_rows: The most rows.
    multiple: The mesh can divide numbers of rows that are multiples of this.
    slots: The room always has `most_rows` rows of so many slots; None: it grows.
    growth: By which factor the number of rows grows. A CPU takes longer for more rows; elsewhere
      fewer programs are worth more.

  Attributes:
    state: The state; None: there is no cache. A program that overwrites it must set it again.
    extras: The arrays over the vocabulary that the rows have.
  """

  def __init__(
    self,
    programs: Programs,
    rows: RowTable,
    vocab_size: int,
    most_rows: int,
    multiple: int,
    slots: int | None,
    growth: int = 4,
  ):
    self.state: State | None = None
    self.extras = options.Extras()
    self._programs, self._rows, self._vocab_size = programs, rows, vocab_size
    self._most_rows, self._multiple, self._fixed_slots = most_rows, multiple, slots
    self._slots, self._growth = 0, growth

  def clear(self) -> None:
    """Frees the memory."""
    self.state, self._slots = None, 0

  @property
  def slots(self) -> int:
    """The number of slots of each row."""
    return self._slots

  def fit(self, waiting: Sequence[Job], may_shrink: bool) -> None:
    """Has room for the jobs that have rows and for these.

    Args:
      waiting: Jobs that will get rows.
      may_shrink: Whether there may be less room than before.
    """
    busy = self._rows.busy
    extras = self.extras.with_(options.Extras.of([job.request for job in waiting]))
    if self._fixed_slots is not None:
      self._set_size(self._most_rows, self._fixed_slots, extras)
      return
    rows = min(self._whole(power(self._growth, len(busy) + len(waiting))), self._most_rows)
    longest = max((job.slots for job in [*waiting, *busy]), default=0)
    slots = power(2, max(longest, _FEWEST_SLOTS))
    if not may_shrink:
      rows = max(rows, len(self._rows))
    if not may_shrink or 4 * slots > self._slots:
      slots = max(slots, self._slots)
    self._set_size(rows, slots, extras)

  def shrink(self) -> None:
    """Leaves out rows when few answers are left, as a CPU takes longer for more rows.

    Whether it does depends on the requests alone, and not on what was compiled before: a run that
    continues generates by the same programs.
    """
    busy = self._rows.busy
    rows = self._whole(power(self._growth, len(busy)))
    if rows >= len(self._rows) or self._fixed_slots is not None:
      return
    if max(job.num_left for job in busy) >= _SHRINK_FOR:
      self._set_size(rows, self._slots, self.extras)

  def shapes(self, rows: int, slots: int) -> State:
    """Returns the shapes of a state."""
    layout = self._programs.layout
    like = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout.everywhere)
    cache: Any = layout.abstract(rows, slots)
    return State(cache, jax.tree.map(like, self._no_rows(rows, options.Extras())))

  def _whole(self, rows: int) -> int:
    return -(-rows // self._multiple) * self._multiple

  def _set_size(self, rows: int, slots: int, extras: options.Extras) -> None:
    """Makes a cache of this size, which keeps what it can of the tokens."""
    if self.state and (rows, slots, extras) == (len(self._rows), self._slots, self.extras):
      return
    if self.state is None or self._rows.is_empty:
      self.state = None  # both at a time may be too much
      self.state = self._empty(rows, slots, extras)
      self._rows.clear(rows)
    else:
      order, state = self._rows.order(rows), self.state
      if extras != self.extras:
        state = state._replace(rows=self._with_extras(state.rows, extras))
      self.state = self._programs.resize(state, np.array(order, np.int32), slots)
      self._rows.move(order, slots)
    self._slots, self.extras = slots, extras

  def _empty(self, rows: int, slots: int, extras: options.Extras) -> State:
    layout = self._programs.layout
    everywhere = layout.everywhere
    place = jnp.asarray if everywhere is None else lambda x: jax.device_put(x, everywhere)
    return State(layout.empty(rows, slots), jax.tree.map(place, self._no_rows(rows, extras)))

  def _no_rows(self, rows: int, extras: options.Extras) -> Rows:
    nothing = options.choices([None] * rows, extras, self._vocab_size)
    zeros: Any = lambda: np.zeros(rows, np.int32)
    is_done: Any = np.ones(rows, bool)
    return Rows(zeros(), zeros(), zeros(), is_done, nothing, self._programs.no_ahead(rows))

  def _with_extras(self, rows: Rows, extras: options.Extras) -> Rows:
    """Returns rows with the arrays of options that no row has needed so far."""
    new = options.choices([None] * len(self._rows), extras, self._vocab_size)
    kept = {k: v for k, v in vars(rows.options).items() if v is not None}
    return dataclasses.replace(rows, options=dataclasses.replace(new, **kept))


def power(base: int, least: int) -> int:
  """Returns the smallest power of `base` that is not below `least`."""
  found = 1
  while found < least:
    found *= base
  return found
