"""Quantized weights: each is several arrays.

The arrays of a weight are a dict in its place: w/values and w/scale instead of w. Their boxes
remember the weight, so that one of a checkpoint is quantized when it is loaded.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from flax import linen as nn
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from paxlite.core.trees import PyTree
from paxlite.core.variable_names import path_name
from paxlite.parallel import partitioning


class QuantizedWeight(NamedTuple):
  """A weight that is quantized: see quantization.schemes.QuantizationScheme."""

  scheme: Any  # the scheme; its `encode` turns the weight into arrays by name
  shape: tuple[int, ...]  # the weight's own shape
  axes: tuple[str | None, ...]  # its logical axes
  summed: tuple[int, ...]  # the dimensions that a product with activations sums over

  def axes_of(self, array: jax.Array) -> tuple[str | None, ...]:
    """Returns the logical axes of one of its arrays: those of the weight, where that is not 1."""
    return tuple(a if n > 1 else None for a, n in zip(self.axes, array.shape, strict=True))


class Quantization(NamedTuple):
  """How the arrays of a weight are made from the weight."""

  # shape, dtype (float32) and sharding of the weight, or of a stack [L, …] of weights
  like: jax.ShapeDtypeStruct
  # the same of what is quantized at a time: the weight, or one of the stack, which may have no room
  # in memory as a whole
  part: jax.ShapeDtypeStruct
  # turns such a part into its arrays by name, sharded
  encode: Callable[[jax.Array], Mapping[str, jax.Array]]
  # shapes, dtypes and shardings of the arrays of the weight, or of the stack
  arrays: Mapping[str, jax.ShapeDtypeStruct]

  @property
  def is_stack(self) -> bool:
    return self.like.ndim > self.part.ndim

  def quantized(self, read: Callable[[int | None], jax.Array]) -> Mapping[str, jax.Array]:
    """Returns the arrays of a weight, or of a stack, of which one weight at a time is read.

    Args:
      read: Returns the weight of a layer of the stack; for None, the weight if there is no stack.
    """
    if not self.is_stack:
      return self.encode(read(None))
    shardings = {name: array.sharding for name, array in self.arrays.items()}
    zeros = lambda: {k: jax.numpy.zeros(x.shape, x.dtype) for k, x in self.arrays.items()}
    put = lambda stack, x, i: jax.tree.map(lambda s, a: s.at[i].set(a), stack, x)
    put = jax.jit(put, donate_argnums=0, out_shardings=shardings)
    stack = jax.jit(zeros, out_shardings=shardings)()
    for i in range(self.like.shape[0]):
      stack = put(stack, self.encode(read(i)), i)
    return stack


class _Box(nn.LogicallyPartitioned):
  weight: QuantizedWeight | None = struct.field(default=None, pytree_node=False)


def quantized_param(
  module: nn.Module, name: str, init: Callable[..., jax.Array], weight: QuantizedWeight
) -> dict[str, jax.Array]:
  """Declares the arrays of a weight, with the initial value of a float32 parameter."""

  def quantized(key: jax.Array) -> Any:
    arrays = weight.scheme.encode(init(key, weight.shape, 'float32'), weight.summed)
    return {k: _Box(array, weight.axes_of(array), weight=weight) for k, array in arrays.items()}

  found: Any = module.param(name, quantized, unbox=True)
  return found


def is_quantized(box: object) -> bool:
  """Whether a box has one of the arrays of a quantized weight, whose dtype its scheme decides."""
  return isinstance(box, _Box)


def num_parameters(boxed: PyTree) -> int:
  """Returns the number of parameters (not bytes) in a boxed tree of arrays or shapes."""
  found: dict[str, int] = {}
  for path, leaf in jax.tree.leaves_with_path(boxed, is_leaf=lambda x: hasattr(x, 'unbox')):
    x, name = leaf.unbox() if hasattr(leaf, 'unbox') else leaf, path_name(path)
    if isinstance(leaf, _Box) and leaf.weight is not None:
      layers = x.shape[0] if x.ndim > len(leaf.weight.shape) else 1
      found[name.rpartition('/')[0]] = layers * math.prod(leaf.weight.shape)
    else:
      found[name] = math.prod(x.shape)
  return sum(found.values())


def quantizations(boxed: PyTree, mesh: Mesh, rules: partitioning.Rules) -> dict[str, Quantization]:
  """Returns how weights of a boxed abstract tree are quantized, by name; a stack is one weight."""
  is_box = lambda x: isinstance(x, nn.LogicallyPartitioned)
  boxes: dict[str, dict[str, _Box]] = {}
  for path, box in jax.tree.leaves_with_path(boxed, is_leaf=is_box):
    if isinstance(box, _Box):
      boxes.setdefault(path_name(path[:-1]), {})[path_name(path[-1:])] = box
  return {name: _quantization(arrays, mesh, rules) for name, arrays in boxes.items()}


def _quantization(boxes: Mapping[str, _Box], mesh: Mesh, rules: partitioning.Rules) -> Quantization:
  box = next(iter(boxes.values()))
  assert box.weight is not None
  scheme, shape, axes, summed = box.weight
  is_stack = box.value.ndim > len(shape)  # along whose layers there is one more axis
  whole = box.value.shape[:1] + shape if is_stack else shape
  split = partitioning.fitting(
    partitioning.spec(box.names[:1] + axes if is_stack else axes, rules), whole, dict(mesh.shape)
  )
  of = lambda shape, split: jax.ShapeDtypeStruct(
    shape, 'float32', sharding=NamedSharding(mesh, split)
  )
  arrays = partitioning.sharded_shapes(dict(boxes), mesh, rules)
  of_part = lambda split: NamedSharding(mesh, PartitionSpec(*split[1:]) if is_stack else split)
  shardings = {name: of_part(array.sharding.spec) for name, array in arrays.items()}
  encode = _encoder(scheme, summed, tuple(sorted(shardings.items())))
  return Quantization(of(whole, split), of(shape, of_part(split).spec), encode, arrays)


@functools.cache
def _encoder(
  scheme: Any, summed: tuple[int, ...], shardings: tuple[tuple[str, NamedSharding], ...]
) -> Callable[[jax.Array], Mapping[str, jax.Array]]:
  """Returns scheme.encode for such weights, which is compiled once for all of one shape."""
  return jax.jit(functools.partial(scheme.encode, summed=summed), out_shardings=dict(shardings))
