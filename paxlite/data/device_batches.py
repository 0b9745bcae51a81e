"""Puts batches on the devices of a mesh."""

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from paxlite.core.errors import UserError
from paxlite.data.base import Batch, Input, prefetch
from paxlite.parallel import partitioning


class DeviceBatches:
  """Global batches on a mesh, two of which are prepared ahead in a thread.

  Args:
    data: Where the batches come from.
    sharding: The sharding of their arrays [B, T].
    start: The first batch in the order of training; None: one pass of an evaluation.
  """

  def __init__(self, data: Input, sharding: jax.sharding.NamedSharding, start: int | None = None):
    rows = partitioning.process_rows(sharding, data.batch_size)
    host = data.eval_batches(rows) if start is None else data.train_batches(start, rows)
    put = functools.partial(to_mesh, sharding=sharding, batch_size=data.batch_size)
    self._batches = prefetch(map(put, _readable(data.name, host)), size=2)
    self._first: dict[str, jax.Array] | None = None

  def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes, dtypes and shardings of the next batch, which stays the next one."""
    self._first = next(self)
    return {
      k: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for k, x in self._first.items()
    }

  def __iter__(self) -> 'DeviceBatches':
    return self

  def __next__(self) -> dict[str, jax.Array]:
    first, self._first = self._first, None
    return next(self._batches) if first is None else first

  def close(self) -> None:
    """Stops the thread."""
    self._batches.close()


def _readable(name: str, batches: Iterator[Batch]) -> Iterator[Batch]:
  """`batches`, with UserError where a file is gone, or its disk."""
  try:
    yield from batches
  except OSError as e:
    what = f'{e.filename}: {e.strerror}' if e.filename else str(e)
    raise UserError(
      f'the data {name} can no longer be read ({what}): put it back and start the run again'
    ) from None


def to_mesh(
  batch: Mapping[str, np.ndarray], sharding: jax.sharding.NamedSharding, batch_size: int
) -> dict[str, jax.Array]:
  """This process's rows of a batch as global arrays [batch_size, T]."""
  first = partitioning.process_rows(sharding, batch_size).start

  def make(rows: np.ndarray) -> jax.Array:
    def part(index: Any) -> np.ndarray:
      start, stop, _ = index[0].indices(batch_size)
      return rows[(slice(start - first, stop - first), *index[1:])]

    return jax.make_array_from_callback((batch_size, *rows.shape[1:]), sharding, part)

  return {k: make(v) for k, v in batch.items()}
