"""The logical axes of an optimizer's state, derived from its parameters."""

from collections.abc import Sequence

import jax
from flax import linen as nn
from jax.tree_util import KeyPath

from paxlite.core.trees import PyTree
from paxlite.core.variable_names import path_name


def is_box(x: object) -> bool:
  """Whether x is a box of Flax around an array, with the array's logical axes."""
  return isinstance(x, nn.meta.AxisMetadata)


def unboxed(params: PyTree) -> PyTree:
  """Returns parameters without their boxes, as an update gets them."""
  return jax.tree.map(lambda x: x.value if is_box(x) else x, params, is_leaf=is_box)


def boxed_like(params: PyTree, state: PyTree) -> PyTree:
  """Returns a state whose arrays are boxed with the logical axes of their parameters.

  An array belongs to a parameter if its path ends with the path of the parameter and it has its
  dimensions, of the same sizes or of parts of them, as the scales of blocks. Others have no axes,
  and are on all devices: counts, factored moments, and arrays of parameters that have no box.
  optax's masks leave nodes without arrays in a state, and these stay.

  Args:
    params: The trainable parameters, with boxes.
    state: A state of an optax transformation for the parameters without boxes.
  """
  boxes = {name: box for name, box in named(params).items() if is_box(box)}

  def one(path: KeyPath, x: jax.Array) -> PyTree:
    name = parameter_of(path, boxes)
    if name is None or not _has_dims_of(boxes[name].value.shape, x.shape):
      return x
    return boxes[name].replace_boxed(x)

  return jax.tree_util.tree_map_with_path(one, state)


def _has_dims_of(parameter: Sequence[int], array: Sequence[int]) -> bool:
  """Whether an array has the dimensions of a parameter, each of its size or of a part of it."""
  return len(parameter) == len(array) and all(
    n > 0 and size % n == 0 for size, n in zip(parameter, array, strict=True)
  )


def named(params: PyTree) -> dict[str, PyTree]:
  """Returns parameters, boxed or not, by their names."""
  return {path_name(p): x for p, x in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_box)}


def parameter_of(path: KeyPath, params: dict[str, PyTree]) -> str | None:
  """Returns the name of the parameter that an array of a state is for; None if there is none."""
  words = path_name(path).split('/')
  ends = ('/'.join(words[i:]) for i in range(len(words)))
  return next((name for name in ends if name in params), None)
