"""Fuses the projections of a model for decoding: see generation.fused_layers."""

import dataclasses
import functools
from collections.abc import Sequence

import fiddle as fdl
import jax
import jax.numpy as jnp
from fiddle import selectors
from flax.linen import meta
from jax.sharding import Mesh, NamedSharding

from paxlite.config.templates import template
from paxlite.core.trees import PyTree
from paxlite.core.variable_names import path_name
from paxlite.generation.fused_layers import (
  FUSED,
  FlatOutputProjection,
  FusedGatedFeedForward,
  FusedQkv,
)
from paxlite.layers.attention.attention import Attention, CombinedQkv, SeparateQkv
from paxlite.layers.feedforward import GatedFeedForward
from paxlite.layers.precision.einsum import Einsum
from paxlite.layers.projection import Projection
from paxlite.parallel import partitioning
from paxlite.quantization.quantized_projection import QuantizedProjection
from paxlite.quantization.schemes import Int8


@dataclasses.dataclass(frozen=True)
class _Kind:
  """Projections of one input that are fused."""

  parts: tuple[str, ...]  # their names
  # the logical axes of the fused weight; those of its bias are the last ones
  axes: tuple[str | None, ...]

  def fused(self, arrays: Sequence[jax.Array]) -> jax.Array:
    """Fuses what the parts have of one kind: weights, their scales, or biases."""
    return jnp.stack(arrays, -2)

  def unfused(self, fused: jax.Array) -> list[jax.Array]:
    """Returns what `fused` was made of."""
    return [fused[..., i, :] for i in range(len(self.parts))]


class _Combined(_Kind):
  """A weight [3, D, N, H], or a bias [3, N, H]."""

  def fused(self, arrays: Sequence[jax.Array]) -> jax.Array:
    return jnp.moveaxis(arrays[0], 0, -2)

  def unfused(self, fused: jax.Array) -> list[jax.Array]:
    return [jnp.moveaxis(fused, -2, 0)]


class _Separate(_Kind):
  """Weights [D, N, H] and twice [D, K, H], or biases [N, H] and twice [K, H]."""

  def fused(self, arrays: Sequence[jax.Array]) -> jax.Array:
    key_heads, H = arrays[1].shape[-2:]
    grouped = [x.reshape(*x.shape[:-2], key_heads, -1, H) for x in arrays]
    return jnp.concatenate(grouped, -2)

  def unfused(self, fused: jax.Array) -> list[jax.Array]:
    queries, H = fused.shape[-2] - 2, fused.shape[-1]
    parts = jnp.split(fused, [queries, queries + 1], -2)
    return [x.reshape(*x.shape[:-3], -1, H) for x in parts]


@dataclasses.dataclass(frozen=True)
class _Flat(_Kind):
  """A weight [D, N, H] as [N · H, D], and a bias [D]; it is all that its layer has."""

  heads: tuple[int, int] = (1, 1)

  def fused(self, arrays: Sequence[jax.Array]) -> jax.Array:
    (x,) = arrays
    return x if x.ndim == 1 else x.reshape(len(x), -1).T

  def unfused(self, fused: jax.Array) -> list[jax.Array]:
    if fused.ndim == 1:
      return [fused]
    heads = self.heads if len(fused) > 1 else (1, 1)  # scales
    return [fused.T.reshape(-1, *heads)]


_HEADS = ('embed', 'heads', None, 'head_dim')
_COMBINED = _Combined(('combined',), _HEADS)
_SEPARATE = _Separate(('query', 'key', 'value'), _HEADS)
_UP = _Kind(('ffn_layer1_gate', 'ffn_layer1'), ('embed', None, 'mlp'))


class FusedProjections:
  """The fused projections of a model, and the conversion of its parameters.

  Layers of other classes stay as they are, subclasses too. Of the layers of paxlite, queries, keys
  and values stay apart if devices do not share the key heads evenly. One of the three kinds stays
  apart in all layers if a layer has low-rank factors there, another quantization than int8, or
  another product than XLA's.

  Args:
    task: The config of a task, the templates of whose model are changed.
    mesh: The mesh of the model's parameters.
    rules: Mapping of logical axes to mesh axes.
  """

  def __init__(self, task: fdl.Config, mesh: Mesh, rules: partitioning.Rules):
    self._mesh, self._rules = mesh, rules
    model = task.model
    shards = partitioning.num_shards(mesh.shape, rules, 'heads')
    kinds = _fuse_qkv(model, shards), _fuse_up(model), _flatten_heads(model)
    by_rank = {len(kind.axes): kind for kind in kinds if kind is not None}
    shapes = meta.unbox(jax.eval_shape(fdl.build(task).init_params, jax.random.key(0)))
    # by the paths of the layers, because other layers may have parts of the same names
    self._kinds: dict[tuple[str, ...], _Kind] = {}
    for path, x in jax.tree.leaves_with_path(shapes):
      names = path_name(path).split('/')
      if FUSED in names and x.ndim in by_rank:
        layer = tuple(names[: names.index(FUSED)])
        known = self._kinds.get(layer)
        if known is None or len(known.axes) < x.ndim:  # a bias has fewer dimensions
          self._kinds[layer] = by_rank[x.ndim]

  def fused(self, params: PyTree, path: tuple[str, ...] = ()) -> PyTree:
    """Returns the parameters of the fused products, in place of `params`, which loses its own."""
    if not isinstance(params, dict):
      return params
    kind = self._kinds.get(path)
    if isinstance(kind, _Flat):
      return {FUSED: self._fuse(kind, params)}
    if kind is not None:
      params[FUSED] = self._fuse(kind, *(params.pop(part) for part in kind.parts))
    return {name: self.fused(params[name], (*path, name)) for name in sorted(params)}

  def unfused(self, params: PyTree, path: tuple[str, ...] = ()) -> PyTree:
    """Returns the parameters by the names that they had before."""
    if not isinstance(params, dict):
      return params
    kind = self._kinds.get(path)
    found = {
      name: self.unfused(x, (*path, name))
      for name, x in params.items()
      if name != FUSED or kind is None
    }
    if kind is not None:
      arrays, tree = jax.tree.flatten(params[FUSED])
      of_parts = zip(*map(kind.unfused, arrays), strict=True)
      parts = [jax.tree.unflatten(tree, part) for part in of_parts]
      if isinstance(kind, _Flat):
        return parts[0]
      found |= zip(kind.parts, parts, strict=True)
    return dict(sorted(found.items()))

  @functools.partial(jax.jit, static_argnums=(0, 1))
  def _fuse(self, kind: _Kind, *parts: PyTree) -> PyTree:
    def fuse(*arrays: jax.Array) -> jax.Array:
      x = kind.fused(arrays)
      split = partitioning.spec_of(x, kind.axes[-x.ndim :], self._mesh, self._rules)
      return jax.lax.with_sharding_constraint(x, NamedSharding(self._mesh, split))

    return jax.tree.map(fuse, *parts)


def _fuse_qkv(model: fdl.Config, shards: int) -> _Kind | None:
  layers = _layers(model, Attention)
  found = [layer.qkv_tpl for layer in layers]
  kinds = {fdl.get_callable(qkv) for qkv in found}
  if kinds == {CombinedQkv}:
    projections = [[qkv.projection_tpl] for qkv in found]
  elif kinds == {SeparateQkv}:
    projections = [[qkv.query_tpl, qkv.key_value_tpl] for qkv in found]
  else:
    return None
  heads = [getattr(qkv, 'num_kv_heads', qkv.num_heads) for qkv in found]
  if not all(map(_are_equal, projections)) or any(n % shards for n in heads):
    return None
  for layer, qkv, num_kv_heads, (projection, *_) in zip(
    layers, found, heads, projections, strict=True
  ):
    sizes = {name: getattr(qkv, name) for name in ('model_dims', 'num_heads', 'head_dim')}
    layer.qkv_tpl = template(
      FusedQkv, num_kv_heads=num_kv_heads, projection_tpl=projection, **sizes
    )
  return _COMBINED if kinds == {CombinedQkv} else _SEPARATE


def _fuse_up(model: fdl.Config) -> _Kind | None:
  found = _layers(model, GatedFeedForward)
  if not all(_are_equal([layer.projection_tpl]) for layer in found):
    return None
  for layer in found:
    fdl.update_callable(layer, FusedGatedFeedForward)
  return _UP


def _flatten_heads(model: fdl.Config) -> _Kind | None:
  layers = _layers(model, Attention)
  heads = {(layer.num_heads, layer.head_dim) for layer in layers}
  if len(heads) != 1 or not all(_are_equal([layer.post_tpl]) for layer in layers):
    return None
  for layer in layers:
    layer.post_tpl = template(FlatOutputProjection, projection_tpl=layer.post_tpl)
  return _Flat((), ('heads', 'embed'), *heads)


def _layers(model: fdl.Config, cls: type) -> list[fdl.Config]:
  """Returns the configs of a class in a model, without those of its subclasses."""
  found = selectors.select(model, cls, check_nonempty=False)
  return [layer for layer in found if fdl.get_callable(layer) is cls]


def _are_equal(projections: Sequence[fdl.Config]) -> bool:
  """Returns whether projections are one product but for their sizes, names and initial values."""
  kinds = {fdl.get_callable(projection) for projection in projections}
  products = {fdl.get_callable(projection.einsum_tpl) for projection in projections}
  if not (kinds == {Projection} or kinds == {QuantizedProjection}) or products != {Einsum}:
    return False
  if kinds != {Projection} and {fdl.get_callable(x.scheme) for x in projections} != {Int8}:
    return False  # arrays of another scheme need not have the dimensions of the weight
  without = lambda x: {k: v for k, v in fdl.ordered_arguments(x).items() if k != 'w_init'}
  return all(without(projection) == without(projections[0]) for projection in projections)
