"""Computes arrays of many rows on the mesh, some rows at a time."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from paxlite.core.trees import PyTree
from paxlite.data.base import one_segment
from paxlite.data.device_batches import to_mesh
from paxlite.parallel import partitioning


def of_rows(
  compute: Callable[[PyTree, Mapping[str, jax.Array]], Any],
  params: PyTree,
  arrays: Mapping[str, np.ndarray],
  size: int,
  mesh: Mesh,
  rules: partitioning.Rules,
) -> Any:
  """Returns the arrays of `compute` for all rows, which every process has, as numpy arrays.

  Args:
    compute: A jitted function of parameters and a batch of `size` rows.
    params: The parameters.
    arrays: All rows, in every process. Without segments, each row is one of them. Rows without
      targets, as packed rows may be, are left out, and have zeros.
    size: The rows of a part.
    mesh: The mesh of the run.
    rules: Maps logical axes to mesh axes.
  """
  sharding = partitioning.batch_sharding(mesh, rules)
  mine = partitioning.process_rows(sharding, size)
  if 'segment_ids' not in arrays:
    arrays = {**arrays, **one_segment(arrays['weights'])}
  is_empty = ~arrays['weights'].any(1)
  order, found = np.argsort(is_empty, kind='stable'), None
  for start in range(0, max(1, int((~is_empty).sum())), size):
    here = np.resize(order[start : start + size], size)  # the last part may have fewer
    part = {k: x[here[mine]] for k, x in arrays.items()}
    with partitioning.activate(mesh, rules):
      on_mesh = compute(params, to_mesh(part, sharding, size))
    values = jax.tree.map(lambda x: multihost_utils.process_allgather(x, tiled=True), on_mesh)
    if found is None:
      found = jax.tree.map(lambda x: np.zeros((len(order), *x.shape[1:]), x.dtype), values)
    for whole, new in zip(jax.tree.leaves(found), jax.tree.leaves(values), strict=True):
      whole[here] = new
  return found
