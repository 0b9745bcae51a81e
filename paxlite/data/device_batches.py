"""Puts batches on the devices of a mesh."""

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from paxlite.core.errors import UserError
from paxlite.data.base import Batch, Input, prefetch
from paxlite.parallel import partitioning


def device_batches(data: Input, sharding: jax.sharding.NamedSharding, start: int | None = None):
  """Global batches on the mesh, made two ahead in a thread: from step `start`, or one eval pass."""
  rows = partitioning.process_rows(sharding, data.batch_size)
  host = data.eval_batches(rows) if start is None else data.train_batches(start, rows)
  put = functools.partial(to_mesh, sharding=sharding, batch_size=data.batch_size)
  return prefetch(map(put, _told(data.name, host)), size=2)


def _told(name: str, batches: Iterator[Batch]) -> Iterator[Batch]:
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
