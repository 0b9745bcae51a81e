"""Lays the weights of a model out for decoding: see layers.joined_products."""

import dataclasses
import functools
from collections.abc import Sequence

import fiddle as fdl
import jax
import jax.numpy as jnp
from fiddle import selectors
from jax.sharding import Mesh, NamedSharding

from paxlite.config.templates import template
from paxlite.core.trees import PyTree
from paxlite.layers.attention.attention import Attention, CombinedQkv, SeparateQkv
from paxlite.layers.feedforward import GatedFeedForward
from paxlite.layers.joined_products import (
  JOINED,
  JoinedGatedFeedForward,
  JoinedQkv,
  MergedHeads,
)
from paxlite.layers.precision.einsum import Einsum
from paxlite.layers.precision.encoded_projection import EncodedProjection
from paxlite.layers.projection import Projection
from paxlite.parallel import partitioning


@dataclasses.dataclass(frozen=True)
class _Kind:
  """Projections of one input that are joined.

  Attributes:
    parts: Their names.
    axes: The logical axes of the joined weight; those of its bias are the last ones.
  """

  parts: tuple[str, ...]
  axes: tuple[str | None, ...]

  def joined(self, arrays: Sequence[jax.Array]) -> jax.Array:
    """Joins what the parts have of one kind: weights, their scales, or biases."""
    return jnp.stack(arrays, -2)

  def parted(self, joined: jax.Array) -> list[jax.Array]:
    """Returns what `joined` was made of."""
    return [joined[..., i, :] for i in range(len(self.parts))]


class _Combined(_Kind):
  """A weight [3, D, N, H], or a bias [3, N, H]."""

  def joined(self, arrays: Sequence[jax.Array]) -> jax.Array:
    return jnp.moveaxis(arrays[0], 0, -2)

  def parted(self, joined: jax.Array) -> list[jax.Array]:
    return [jnp.moveaxis(joined, -2, 0)]


class _Separate(_Kind):
  """Weights [D, N, H] and twice [D, K, H], or biases [N, H] and twice [K, H]."""

  def joined(self, arrays: Sequence[jax.Array]) -> jax.Array:
    key_heads, H = arrays[1].shape[-2:]
    grouped = [x.reshape(*x.shape[:-2], key_heads, -1, H) for x in arrays]
    return jnp.concatenate(grouped, -2)

  def parted(self, joined: jax.Array) -> list[jax.Array]:
    queries, H = joined.shape[-2] - 2, joined.shape[-1]
    parts = jnp.split(joined, [queries, queries + 1], -2)
    return [x.reshape(*x.shape[:-3], -1, H) for x in parts]


@dataclasses.dataclass(frozen=True)
class _Merged(_Kind):
  """A weight [D, N, H] as [N · H, D], and a bias [D]."""

  heads: tuple[int, int] = (1, 1)

  def joined(self, arrays: Sequence[jax.Array]) -> jax.Array:
    (x,) = arrays
    return x if x.ndim == 1 else x.reshape(len(x), -1).T

  def parted(self, joined: jax.Array) -> list[jax.Array]:
    if joined.ndim == 1:
      return [joined]
    heads = self.heads if len(joined) > 1 else (1, 1)  # scales
    return [joined.T.reshape(-1, *heads)]


_POST = 'post'  # the output projection of Attention
_HEADS = ('embed', 'heads', None, 'head_dim')
_COMBINED = _Combined(('combined',), _HEADS)
_SEPARATE = _Separate(('query', 'key', 'value'), _HEADS)
_UP = _Kind(('ffn_layer1_gate', 'ffn_layer1'), ('embed', None, 'mlp'))


class JoinedWeights:
  """What of a model is joined, and how its parameters follow.

  A model keeps its layers as they are if one of their class is a subclass, has low-rank factors or
  another product than XLA's, or if devices do not share its key heads evenly.

  Args:
    model: The config of the model, whose templates are changed.
    mesh: The mesh of its parameters.
    rules: Mapping of logical axes to mesh axes.
  """

  def __init__(self, model: fdl.Config, mesh: Mesh, rules: partitioning.Rules):
    self._mesh, self._rules = mesh, rules
    shards = partitioning.num_shards(mesh.shape, rules, 'heads')
    kinds = _join_qkv(model, shards), _join_up(model), _merge_heads(model)
    self._kinds = [kind for kind in kinds if kind is not None]

  def joined(self, params: PyTree) -> PyTree:
    """Returns the parameters of the joined products; takes them out of `params`, to save memory."""
    if not isinstance(params, dict):
      return params
    for kind in self._kinds:
      if isinstance(kind, _Merged):
        if params.keys() >= {'qkv', _POST}:  # of an Attention
          params[_POST] = {JOINED: self._join(kind, params[_POST])}
      elif params.keys() >= set(kind.parts):
        params[JOINED] = self._join(kind, *(params.pop(part) for part in kind.parts))
    return {name: self.joined(x) for name, x in sorted(params.items())}

  def parted(self, params: PyTree) -> PyTree:
    """Returns the parameters by the names that they had before."""
    if not isinstance(params, dict):
      return params
    found = {name: self.parted(x) for name, x in params.items() if name != JOINED}
    if JOINED in params:
      arrays, tree = jax.tree.flatten(params[JOINED])
      rank = max(x.ndim for x in arrays)
      (kind,) = (k for k in self._kinds if len(k.axes) == rank)
      of_parts = zip(*map(kind.parted, arrays), strict=True)
      parts = [jax.tree.unflatten(tree, part) for part in of_parts]
      if isinstance(kind, _Merged):
        return parts[0]
      found |= zip(kind.parts, parts, strict=True)
    return dict(sorted(found.items()))

  @functools.partial(jax.jit, static_argnums=(0, 1))
  def _join(self, kind: _Kind, *parts: PyTree) -> PyTree:
    def join(*arrays: jax.Array) -> jax.Array:
      x = kind.joined(arrays)
      split = partitioning.spec_of(x, kind.axes[-x.ndim :], self._mesh, self._rules)
      return jax.lax.with_sharding_constraint(x, NamedSharding(self._mesh, split))

    return jax.tree.map(join, *parts)


def _join_qkv(model: fdl.Config, shards: int) -> _Kind | None:
  layers = list(selectors.select(model, Attention, check_nonempty=False))
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
      JoinedQkv, num_kv_heads=num_kv_heads, projection_tpl=projection, **sizes
    )
  return _COMBINED if kinds == {CombinedQkv} else _SEPARATE


def _join_up(model: fdl.Config) -> _Kind | None:
  found = list(selectors.select(model, GatedFeedForward, check_nonempty=False))
  kinds = {fdl.get_callable(layer) for layer in found}
  if kinds != {GatedFeedForward} or not all(_are_equal([x.projection_tpl]) for x in found):
    return None
  for layer in found:
    fdl.update_callable(layer, JoinedGatedFeedForward)
  return _UP


def _merge_heads(model: fdl.Config) -> _Kind | None:
  layers = list(selectors.select(model, Attention, check_nonempty=False))
  heads = {(layer.num_heads, layer.head_dim) for layer in layers}
  if len(heads) != 1 or not all(_are_equal([layer.post_tpl]) for layer in layers):
    return None
  for layer in layers:
    layer.post_tpl = template(MergedHeads, projection_tpl=layer.post_tpl)
  return _Merged((_POST,), ('heads', 'embed'), *heads)


def _are_equal(projections: Sequence[fdl.Config]) -> bool:
  """Returns whether projections are one product but for their sizes, names and initial values."""
  kinds = {fdl.get_callable(projection) for projection in projections}
  products = {fdl.get_callable(projection.einsum_tpl) for projection in projections}
  if not (kinds == {Projection} or kinds == {EncodedProjection}) or products != {Einsum}:
    return False
  without = lambda x: {k: v for k, v in fdl.ordered_arguments(x).items() if k != 'w_init'}
  return all(without(projection) == without(projections[0]) for projection in projections)
