"""Weights that are kept in another form than they are computed in, each as several arrays.

The arrays of a weight are a dict in its place: w/values and w/scale instead of w. Their boxes
remember the weight, so that one of a checkpoint is encoded when it is loaded.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from flax import linen as nn
from flax import struct
from jax.sharding import Mesh, NamedSharding

from paxlite.core.trees import PyTree
from paxlite.core.variable_names import path_name
from paxlite.parallel import partitioning


class EncodedWeight(NamedTuple):
  """A weight that is kept in a form: see layers.precision.weight_forms.WeightForm.

  Attributes:
    form: The form; its `encode` turns the weight into arrays by name.
    shape: The weight's own shape.
    axes: Its logical axes.
    summed: The dimensions that a product with activations sums over.
  """

  form: Any
  shape: tuple[int, ...]
  axes: tuple[str | None, ...]
  summed: tuple[int, ...]

  def axes_of(self, array: jax.Array) -> tuple[str | None, ...]:
    """Returns the logical axes of one of its arrays: those of the weight, where that is not 1."""
    return tuple(a if n > 1 else None for a, n in zip(self.axes, array.shape, strict=True))


class Encoding(NamedTuple):
  """How the arrays of a weight are made from the weight.

  Attributes:
    like: Shape, dtype (float32) and sharding of the weight.
    encode: Turns it into its arrays by name, sharded.
  """

  like: jax.ShapeDtypeStruct
  encode: Callable[[jax.Array], Mapping[str, jax.Array]]


class _Box(nn.LogicallyPartitioned):
  weight: EncodedWeight | None = struct.field(default=None, pytree_node=False)


def encoded_param(
  module: nn.Module, name: str, init: Callable[..., jax.Array], weight: EncodedWeight
) -> dict[str, jax.Array]:
  """Declares the arrays of a weight, whose initial value is that of a float32 parameter."""

  def encoded(key: jax.Array) -> Any:
    arrays = weight.form.encode(init(key, weight.shape, 'float32'), weight.summed)
    return {k: _Box(array, weight.axes_of(array), weight=weight) for k, array in arrays.items()}

  found: Any = module.param(name, encoded, unbox=True)
  return found


def encodings(boxed: PyTree, mesh: Mesh, rules: partitioning.Rules) -> dict[str, Encoding]:
  """Returns how weights of a boxed abstract tree are encoded, by name; those of a stack at once."""
  is_box = lambda x: isinstance(x, nn.LogicallyPartitioned)
  boxes: dict[str, dict[str, _Box]] = {}
  for path, box in jax.tree.leaves_with_path(boxed, is_leaf=is_box):
    if isinstance(box, _Box):
      boxes.setdefault(path_name(path[:-1]), {})[path_name(path[-1:])] = box
  return {name: _encoding(arrays, mesh, rules) for name, arrays in boxes.items()}


def _encoding(boxes: Mapping[str, _Box], mesh: Mesh, rules: partitioning.Rules) -> Encoding:
  box = next(iter(boxes.values()))
  assert box.weight is not None
  form, shape, axes, summed = box.weight
  encode = functools.partial(form.encode, summed=summed)
  if box.value.ndim > len(shape):  # of a stack, along whose layers there is one more axis
    shape, axes, encode = box.value.shape[:1] + shape, box.names[:1] + axes, jax.vmap(encode)
  split = partitioning.fitting(partitioning.spec(axes, rules), shape, dict(mesh.shape))
  like = jax.ShapeDtypeStruct(shape, 'float32', sharding=NamedSharding(mesh, split))
  arrays = partitioning.sharded_shapes(dict(boxes), mesh, rules)
  shardings = {name: array.sharding for name, array in arrays.items()}
  return Encoding(like, jax.jit(encode, out_shardings=shardings))
