"""Weights that are kept in another form than they are computed in, each as several arrays.

A module declares such a weight with `encoded_param`. Its arrays are a dict in the place where the
weight itself would be: w/values and w/scale instead of w. The box of each array remembers the
weight, so that the weight of a checkpoint is encoded when it is loaded.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
from flax import linen as nn
from flax import struct
from jax.sharding import Mesh, NamedSharding

from paxlite.core.trees import PyTree
from paxlite.core.variable_names import path_name
from paxlite.parallel import partitioning


class Form(Protocol):
  """What is needed of a form to declare and to load a weight: see layers.weight_forms."""

  def encode(self, w: jax.Array, summed: Sequence[int]) -> dict[str, jax.Array]: ...

  def axes(
    self, axes: Sequence[str | None], summed: Sequence[int]
  ) -> Mapping[str, tuple[str | None, ...]]: ...


@dataclasses.dataclass(frozen=True)
class Weight:
  """A weight that is kept in a form.

  Attributes:
    form: The form.
    shape: The weight's own shape.
    axes: Its logical axes.
    summed: The dimensions that a product with activations sums over.
  """

  form: Form
  shape: tuple[int, ...]
  axes: tuple[str | None, ...]
  summed: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Encoding:
  """How the arrays of a weight are made from the weight itself.

  Attributes:
    like: Shape, dtype (float32) and sharding of the weight.
    arrays: Those of its arrays, by name.
    encode: Turns the weight into its arrays.
  """

  like: jax.ShapeDtypeStruct
  arrays: Mapping[str, jax.ShapeDtypeStruct]
  encode: Callable[[jax.Array], Mapping[str, jax.Array]]

  def __call__(self, w: jax.Array) -> Mapping[str, jax.Array]:
    """Returns the arrays of a weight, sharded."""
    shardings = {name: like.sharding for name, like in self.arrays.items()}
    return jax.jit(self.encode, out_shardings=shardings)(w)


class _Box(nn.LogicallyPartitioned):
  """The box of an array of a weight.

  Attributes:
    weight: The weight.
  """

  weight: Weight | None = struct.field(default=None, pytree_node=False)


def encoded_param(
  module: nn.Module, name: str, init: Callable[..., jax.Array], weight: Weight
) -> dict[str, jax.Array]:
  """Declares the arrays of a weight, whose initial value is that of a float32 parameter."""
  axes = weight.form.axes(weight.axes, weight.summed)

  def encoded(key: jax.Array) -> Any:
    arrays = weight.form.encode(init(key, weight.shape, 'float32'), weight.summed)
    return {k: _Box(array, axes[k], weight=weight) for k, array in arrays.items()}

  found: Any = module.param(name, encoded, unbox=True)
  return found


def encodings(boxed: PyTree, mesh: Mesh, rules: partitioning.Rules) -> dict[str, Encoding]:
  """Returns how weights of a tree are encoded, by name; the weights of a stack all at once.

  Args:
    boxed: Abstract parameters or a state, boxed.
    mesh: The devices.
    rules: The mesh axes of each logical axis.
  """
  is_box = lambda x: isinstance(x, nn.LogicallyPartitioned)
  leaves = jax.tree.leaves_with_path(boxed, is_leaf=is_box)
  groups: dict[str, dict[str, _Box]] = {}
  for path, box in leaves:
    if isinstance(box, _Box):
      prefix, _, key = path_name(path).rpartition('/')
      groups.setdefault(prefix, {})[key] = box
  return {name: _encoding(boxes, mesh, rules) for name, boxes in groups.items()}


def _encoding(boxes: Mapping[str, _Box], mesh: Mesh, rules: partitioning.Rules) -> Encoding:
  arrays = partitioning.sharded_shapes(dict(boxes), mesh, rules)
  box = next(iter(boxes.values()))
  weight = box.weight
  assert weight is not None
  encode = lambda w: weight.form.encode(w, weight.summed)
  shape, axes = weight.shape, weight.axes
  if len(box.names) > len(next(iter(weight.form.axes(axes, weight.summed).values()))):
    shape, axes = (box.value.shape[0], *shape), (box.names[0], *axes)  # a repeated stack
    encode = jax.vmap(encode)
  split = partitioning.fitting(partitioning.spec(axes, rules), shape, dict(mesh.shape))
  like = jax.ShapeDtypeStruct(shape, 'float32', sharding=NamedSharding(mesh, split))
  return Encoding(like, arrays, encode)
