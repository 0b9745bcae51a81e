"""Puts batches on the devices of a mesh."""

import functools
from collections.abc import Iterator, Mapping
from typing import Protocol

import jax
import numpy as np

from paxlite.core.errors import UserError
from paxlite.core.trees import PyTree
from paxlite.data.base import Batch, Input, prefetch
from paxlite.data.batch_check import check
from paxlite.parallel import partitioning


class StepBatches(Protocol):
  """Global batches on a mesh, of which a step draws one."""

  def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes, dtypes and shardings of the next batch, without consuming it."""
    ...

  def draw(self, params: PyTree) -> dict[str, jax.Array]:
    """Returns the next batch, for these parameters."""
    ...

  def close(self) -> None:
    """Ends what reads ahead."""
    ...


class DeviceBatches:
  """Iterates over global batches on a mesh; a thread prepares two of them ahead.

  Args:
    data: The input that yields the batches.
    sharding: The sharding of the batches' arrays [B, T].
    start: The step of the first training batch; None: one pass of an evaluation.
    max_segments: The most segments of a packed row, padding included; 0: any number.
  """

  def __init__(
    self,
    data: Input,
    sharding: jax.sharding.NamedSharding,
    start: int | None = None,
    max_segments: int = 0,
  ):
    rows = partitioning.process_rows(sharding, data.batch_size)
    host = data.eval_batches(rows) if start is None else data.train_batches(start, rows)
    put = functools.partial(to_mesh, sharding=sharding, batch_size=data.batch_size)
    checked = _checked(data, rows.stop - rows.start, max_segments, host)
    self._batches = prefetch(map(put, checked), size=2)
    self._first: dict[str, jax.Array] | None = None

  def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes, dtypes and shardings of the next batch, without consuming it."""
    self._first = next(self)
    return {
      k: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for k, x in self._first.items()
    }

  def __iter__(self) -> 'DeviceBatches':
    return self

  def __next__(self) -> dict[str, jax.Array]:
    first, self._first = self._first, None
    return next(self._batches) if first is None else first

  def draw(self, params: PyTree) -> dict[str, jax.Array]:
    """Returns the next batch, which does not depend on the parameters."""
    return next(self)

  def close(self) -> None:
    """Stops the thread."""
    self._batches.close()


def _checked(
  data: Input, num_rows: int, max_segments: int, batches: Iterator[Batch]
) -> Iterator[Batch]:
  """Yields `batches`; raises UserError if one of them is wrong, or can no longer be read."""
  try:
    for batch in batches:
      check(data, batch, num_rows, max_segments)
      yield batch
  except OSError as e:
    what = f'{e.filename}: {e.strerror}' if e.filename else str(e)
    raise UserError(
      f'the data {data.name} can no longer be read ({what}): put it back and start the run again'
    ) from None


def to_mesh(
  batch: Mapping[str, np.ndarray], sharding: jax.sharding.NamedSharding, batch_size: int
) -> dict[str, jax.Array]:
  """Makes global arrays [batch_size, T] of this process's rows of a batch."""
  first = partitioning.process_rows(sharding, batch_size).start

  def make(rows: np.ndarray) -> jax.Array:
    def part(index: tuple[slice, ...] | None) -> np.ndarray:
      assert index is not None
      start, stop, _ = index[0].indices(batch_size)
      return rows[(slice(start - first, stop - first), *index[1:])]

    return jax.make_array_from_callback((batch_size, *rows.shape[1:]), sharding, part)

  return {k: make(v) for k, v in batch.items()}
