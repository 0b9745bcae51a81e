"""Trees of gradient probes: parameters get gradients of their dtype (partitioning.PROBES)."""

import jax
from flax import traverse_util

from paxlite.core.trees import PyTree


def names_of(probes: PyTree) -> list[str]:
  """Returns the names of the parameters that have a probe."""
  return ['/'.join(path) for path in traverse_util.flatten_dict(without_gaps(probes or {}))]


def without_gaps(tree: PyTree) -> PyTree:
  """Returns nested dicts without the entries that are None."""
  flat = traverse_util.flatten_dict(tree)
  return traverse_util.unflatten_dict({k: v for k, v in flat.items() if v is not None})


def gradients_of(direct: PyTree, probed: PyTree) -> PyTree:
  """Returns the gradients of parameters from those of the parameters and those of their probes.

  The model reads a parameter through its probe, and a loss of one's own may read it besides. The
  sum has the dtype of the probe. One of the arguments may be None.
  """
  if direct is None or probed is None:
    return probed if direct is None else direct
  return jax.tree.map(lambda t, d: (t.astype(d.dtype) + d).astype(t.dtype), probed, direct)
