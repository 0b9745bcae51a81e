"""Token and position embeddings, and the projection back to the vocabulary."""

import math

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from paxlite.layers.precision.weight_matmul import weight_matmul
from paxlite.layers.projection import Initializer
from paxlite.parallel.partitioning import gather_weight, param, shard, shards_of

_HEAD_AXES = ('vocab', 'embed')  # of an embedding table and of the weight of the logits


class TokenEmbedding(nn.Module):
  """An embedding table [V, D], which also computes the logits if embedding and head are tied.

  Embeddings are multiplied by `lookup_scale` (Gemma: √D). The activations from which logits are
  computed are multiplied by `attend_scale` (GLaM: 1/√D).

  The table is stored as [V, D], and not as Pax's [D, V]: gathering columns makes a step of a small
  model on CPU 1.25 to 1.5 times as long (measured, jax 0.10).
  """

  vocab_size: int
  model_dims: int
  emb_init: Initializer = nn.initializers.normal(0.02)
  lookup_scale: float = 1.0
  attend_scale: float = 1.0
  dtype: DTypeLike = jnp.float32

  def setup(self) -> None:
    shape = [self.vocab_size, self.model_dims]
    self.emb_var = param(self, 'emb_var', self.emb_init, shape, _HEAD_AXES, equation='BTV,VD->BTD')

  def __call__(self, ids_BT: jax.Array) -> jax.Array:
    """Maps ids [B, T] to embeddings [B, T, D]."""
    x_BTD = self.looked_up(ids_BT)
    # the scale is rounded to the activations' dtype, as in the training of Gemma's weights
    return x_BTD if self.lookup_scale == 1 else x_BTD * jnp.asarray(self.lookup_scale, self.dtype)

  def looked_up(self, ids_BT: jax.Array) -> jax.Array:
    """Returns rows of the table, [B, T, D]."""
    # the cast comes after the lookup, so that the gradient's scatter adds in float32
    return _lookup(self.emb_var, ids_BT).astype(self.dtype)

  def weight(self) -> jax.Array:
    """Returns the table as the weight of the logits, [V, D]."""
    return self.emb_var.astype(self.dtype)

  def attend(self, x_BTD: jax.Array) -> jax.Array:
    """Maps activations [B, T, D] to logits [B, T, V]."""
    return weight_matmul('BTD,VD->BTV', *self.factors(x_BTD), _HEAD_AXES)

  def factors(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the two arrays whose product the logits are, [B, T, D] and [V, D]."""
    x_BTD = x_BTD.astype(self.dtype)
    if self.attend_scale != 1:
      x_BTD = x_BTD * jnp.asarray(self.attend_scale, self.dtype)
    return x_BTD, gather_weight(self.weight(), _HEAD_AXES)


def _lookup(table_VD: jax.Array, ids_BT: jax.Array) -> jax.Array:
  """Returns rows of a table, [B, T, D].

  Each device looks up its part of D for the tokens of all devices along the mesh axes data and
  context. Then these devices exchange their parts. If the rows of the table were split as well,
  each device would have to look up all tokens of the batch.
  """
  (B, T), (V, D) = ids_BT.shape, table_VD.shape
  # where context does not divide D, each device looks up its own tokens
  is_split = shards_of('lookup_embed', D) > shards_of('exchanged_embed', D)
  length = 'lookup_length' if is_split else 'length'
  table_VD = shard(table_VD, None, 'lookup_embed')
  ids_BT = shard(ids_BT, 'lookup_batch', length)
  groups = shards_of('lookup_batch', B)
  if groups == 1 or shards_of('lookup_embed', D) == 1:
    x_BTD = table_VD[ids_BT]
  else:
    # A group of devices adds up the gradient of its own rows in its own copy of the table, and the
    # groups add up their shards. XLA would otherwise add up the whole table over all devices.
    copies_GVD = jnp.broadcast_to(table_VD, (groups, V, D))
    copies_GVD = shard(copies_GVD, 'lookup_batch', None, 'lookup_embed')
    ids_GBT = shard(ids_BT.reshape(groups, -1, T), 'lookup_batch', None, length)
    x_GBTD = jax.vmap(lambda table, ids: table[ids])(copies_GVD, ids_GBT)
    x_GBTD = shard(x_GBTD, 'lookup_batch', None, length, 'lookup_embed')
    x_BTD = x_GBTD.reshape(B, T, D)
  x_BTD = shard(x_BTD, 'lookup_batch', length, 'lookup_embed')
  # XLA exchanges along one axis at a time; along both, it would gather everything
  return shard(x_BTD, 'lookup_batch', 'length', 'exchanged_embed')


class LearnedPositions(nn.Module):
  """Learned embeddings of positions, a table [max_length, D]; [B or 1, T] to [B or 1, T, D]."""

  max_length: int
  model_dims: int
  emb_init: Initializer = nn.initializers.normal(0.02)
  dtype: DTypeLike = jnp.float32

  @nn.compact
  def __call__(self, positions_BT: jax.Array) -> jax.Array:
    shape, axes = [self.max_length, self.model_dims], ['positions', 'embed']
    table = param(self, 'emb_var', self.emb_init, shape, axes, equation='BTP,PD->BTD')
    return _lookup(table, positions_BT).astype(self.dtype)


class SinusoidalPositions(nn.Module):
  """Fixed sines and cosines of positions, [B or 1, T] to [B or 1, T, D].

  Sines fill the first half of D and cosines the second half. The wavelengths range from 2π to
  2π·max_timescale (https://arxiv.org/abs/1706.03762, section 3.5).
  """

  model_dims: int
  max_timescale: float = 10_000.0
  dtype: DTypeLike = jnp.float32

  @nn.compact
  def __call__(self, positions_BT: jax.Array) -> jax.Array:
    half = self.model_dims // 2
    rates = jnp.exp(-math.log(self.max_timescale) * jnp.arange(half) / max(half - 1, 1))
    angles = positions_BT[..., None].astype(jnp.float32) * rates
    table = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    return jnp.pad(table, [(0, 0), (0, 0), (0, self.model_dims % 2)]).astype(self.dtype)


class LmHead(nn.Module):
  """A separate projection to the vocabulary, w [V, D] without bias.

  The activations are multiplied by `attend_scale`, as in a TokenEmbedding.
  """

  vocab_size: int
  model_dims: int
  w_init: Initializer = nn.initializers.normal(0.02)
  attend_scale: float = 1.0
  dtype: DTypeLike = jnp.float32

  def attend(self, x_BTD: jax.Array) -> jax.Array:
    """Maps activations [B, T, D] to logits [B, T, V]."""
    return weight_matmul('BTD,VD->BTV', *self.factors(x_BTD), _HEAD_AXES)

  @nn.compact
  def factors(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the two arrays whose product the logits are, [B, T, D] and [V, D]."""
    w_VD = self.weight()
    x_BTD = x_BTD.astype(self.dtype)
    if self.attend_scale != 1:
      x_BTD = x_BTD * jnp.asarray(self.attend_scale, self.dtype)
    return x_BTD, gather_weight(w_VD, _HEAD_AXES)

  def weight(self) -> jax.Array:
    """Returns w [V, D]; `factors` calls it."""
    shape = [self.vocab_size, self.model_dims]
    w_VD = param(self, 'w', self.w_init, shape, _HEAD_AXES, equation='BTD,VD->BTV')
    return w_VD.astype(self.dtype)


class LmHeadBias(nn.Module):
  """logits + b, where b [V] starts at 0; Pax's base class of language models has this bias."""

  vocab_size: int

  def setup(self) -> None:
    self.b = param(self, 'b', nn.initializers.zeros, [self.vocab_size], ['vocab'])

  def __call__(self, logits_BTV: jax.Array) -> jax.Array:
    return logits_BTV + self.b.astype(logits_BTV.dtype)
