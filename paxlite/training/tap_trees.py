"""Trees of taps, through which parameters get gradients of another dtype (partitioning.TAPS)."""

import jax
from flax import traverse_util

from paxlite.core.trees import PyTree


def names_of(taps: PyTree) -> list[str]:
  """Returns the names of the parameters that have a tap."""
  return ['/'.join(path) for path in traverse_util.flatten_dict(without_gaps(taps or {}))]


def without_gaps(tree: PyTree) -> PyTree:
  """Returns nested dicts without the entries that are None."""
  flat = traverse_util.flatten_dict(tree)
  return traverse_util.unflatten_dict({k: v for k, v in flat.items() if v is not None})


def gradients_of(direct: PyTree, tapped: PyTree) -> PyTree:
  """Returns the gradients of parameters from those of the parameters and those of their taps.

  The model reads a parameter through its tap, and a loss of one's own may read it besides. The sum
  has the dtype of the tap. One of the arguments may be None.
  """
  if direct is None or tapped is None:
    return tapped if direct is None else direct
  return jax.tree.map(lambda t, d: (t.astype(d.dtype) + d).astype(t.dtype), tapped, direct)
