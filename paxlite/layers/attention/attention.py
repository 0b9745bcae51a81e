"""Causal self-attention, with its projections to queries, keys and values and to the output.

If the collection 'cache' is mutable, attention also keeps keys and values for later tokens; see
Attention.
"""

import dataclasses
import functools
import math
from typing import cast

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from paxlite.config.templates import Template, template_field
from paxlite.core.variable_names import INDEX, PAGES
from paxlite.layers.attention import tpu_cached_attention
from paxlite.layers.attention.attention_kernel import AttentionKernel
from paxlite.layers.attention.cache_encoding import (
  EncodedVectors,
  Stored,
  arrays_of,
  encoded,
  slot_axis,
)
from paxlite.layers.attention.paged_vectors import PagedVectors
from paxlite.layers.attention.softmax_attention import AttentionMask, Segments, Softmax
from paxlite.layers.norms import RmsNorm
from paxlite.layers.projection import Projection, to_heads, to_output
from paxlite.parallel.partitioning import param, shard


class CombinedQkv(nn.Module):
  """Queries, keys and values by one weight [3, D, N, H], [B, T, D] to three times [B, T, N, H]."""

  model_dims: int
  num_heads: int
  head_dim: int
  projection_tpl: Template = template_field(Projection)

  @nn.compact
  def __call__(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    shape = (3, self.model_dims, self.num_heads, self.head_dim)
    # if A came before B, GPUs would transpose all three, once forward and twice backward
    qkv_BTANH = self.projection_tpl(
      equation='BTD,ADNH->BTANH', shape=shape, axes=('qkv', 'embed', 'heads', 'head_dim'),
      name='combined',
    )(x_BTD)  # fmt: skip
    qkv_BTANH = checkpoint_name(qkv_BTANH, 'combined_qkv_proj')
    qkv_BTANH = shard(qkv_BTANH, 'batch', 'length', None, 'act_heads', None)
    return qkv_BTANH[:, :, 0], qkv_BTANH[:, :, 1], qkv_BTANH[:, :, 2]


class SeparateQkv(nn.Module):
  """Queries [B, T, N, H], and keys and values [B, T, K, H], by three weights (grouped queries)."""

  model_dims: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  query_tpl: Template = template_field(Projection)
  key_value_tpl: Template = template_field(Projection)

  @nn.compact
  def __call__(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    def project(projection_tpl: Template, name: str, heads: int, axis: str) -> jax.Array:
      shape = (self.model_dims, heads, self.head_dim)
      return checkpoint_name(to_heads(projection_tpl, name, x_BTD, shape, axis), f'{name}_proj')

    query = project(self.query_tpl, 'query', self.num_heads, 'heads')
    key = project(self.key_value_tpl, 'key', self.num_kv_heads, 'kv_heads')
    value = project(self.key_value_tpl, 'value', self.num_kv_heads, 'kv_heads')
    return shard(query, 'batch', 'length', 'act_heads', None), key, value


class PerDimScale(nn.Module):
  """Queries · softplus(per_dim_scale) / ln 2, [B, T, N, H] to [B, T, N, H].

  per_dim_scale [H] starts at 0, a factor of 1. Pax's base class of language models learns it.
  """

  @nn.compact
  def __call__(self, q_BTNH: jax.Array) -> jax.Array:
    w = param(self, 'per_dim_scale', nn.initializers.zeros, q_BTNH.shape[-1:], ['head_dim'])
    return q_BTNH * (jax.nn.softplus(w) / math.log(2)).astype(q_BTNH.dtype)


class FullWidthNorm(nn.Module):
  """A norm over all heads together, [B, T, N, H] to [B, T, N, H], with a scale [N·H]."""

  norm_tpl: Template = template_field(RmsNorm)

  @nn.compact
  def __call__(self, x_BTNH: jax.Array) -> jax.Array:
    B, T, N, H = x_BTNH.shape
    return self.norm_tpl(name='norm')(x_BTNH.reshape(B, T, N * H)).reshape(B, T, N, H)


class AttentionSinks(nn.Module):
  """Learned logits [N] of virtual keys with values 0, one per head.

  See https://arxiv.org/abs/2309.17453, section 3.3.
  """

  num_heads: int  # N

  @nn.compact
  def __call__(self) -> jax.Array:
    return param(self, 'logits', nn.initializers.zeros, [self.num_heads], ['heads'])


class DotProductAttention(nn.Module):
  """softmax(cap(q·k) + bias + mask)·v, with the softmax in float32."""

  query_scale: float  # factor of the queries
  logit_cap: float = 0.0  # the logits are capped by cap · tanh(logits / cap); ≤ 0 means no cap
  # a query sees this many of the latest keys, including its own; ≤ 0 means all keys
  window: int = 0
  # a bias of the logits, such as RelativeBias, which is called with (B, T, S, start); None means no
  # bias
  relative_bias_tpl: Template | None = None
  # the logit of an attention sink, a virtual key whose value is 0; None means no sink
  sink_logit: float | None = None
  # the same with a logit for each head, [N], which this module returns; None means none
  sinks_tpl: Template | None = None
  dropout: float = 0.0  # dropout rate of the attention weights
  # computes the attention; see attention_kernel
  kernel_tpl: Template = template_field(AttentionKernel)

  @nn.compact
  def __call__(
    self,
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    segment_ids_BT: jax.Array | None = None,
    start: jax.Array | int = 0,
    bias_B1TS: jax.Array | None = None,
  ) -> jax.Array:
    """Returns the context [B, T, N, H]; a query sees only its own key and earlier keys.

    Args:
      q_BTNH: Queries.
      k_BSKH: Keys; N / K neighboring query heads share a key head.
      v_BSKH: Values.
      segment_ids_BT: Segments of the queries and keys; a query sees only keys of its own segment.
      start: Index of the first query among the keys, 0 or [B].
      bias_B1TS: A bias of the scores of each row, in the place of relative_bias_tpl.
    """
    B, T, S = *q_BTNH.shape[:2], k_BSKH.shape[1]
    visible = AttentionMask(start, self.window, self.segments(segment_ids_BT, S, start))
    bias_JNTS = bias_B1TS
    if self.relative_bias_tpl is not None:
      bias_JNTS = self.relative_bias_tpl(name='relative_bias')(B, T, S, start)
    drops = self.dropout > 0 and self.has_rng('dropout')
    softmax = Softmax(
      self.query_scale, self.logit_cap, self.window,
      self.sink_logit if self.sinks_tpl is None else self.sinks_tpl(name='sinks')(),
      nn.Dropout(self.dropout, deterministic=False) if drops else None,
    )  # fmt: skip
    return self.kernel_tpl()(q_BTNH, k_BSKH, v_BSKH, visible, bias_JNTS, softmax)

  def segments(
    self, segment_ids_BT: jax.Array | None, keys: int, start: jax.Array | int
  ) -> Segments | None:
    """Returns the segments of the queries [B, T] and of the keys [B, S], or None for no segments.

    Args:
      segment_ids_BT: As for __call__.
      keys: S.
      start: As for __call__.
    """
    return None if segment_ids_BT is None else (segment_ids_BT, segment_ids_BT)


class Attention(nn.Module):
  """Multi-head causal self-attention, [B, T, D] to [B, T, D].

  If the caller makes the collection 'cache' mutable, attention keeps keys and values of its tokens
  there; see append_to_cache.
  """

  model_dims: int  # D
  num_heads: int  # N
  head_dim: int  # H
  qkv_tpl: Template = template_field(CombinedQkv)  # computes queries, keys and values
  # a norm of the queries, and another of the keys; None means no norm
  qk_norm_tpl: Template | None = None
  value_norm_tpl: Template | None = None  # a norm of the values; None means no norm
  query_scale_tpl: Template | None = None  # a learned scale of the queries; None means no scale
  # rotates queries and keys by their positions; None means no rotation
  rotary_tpl: Template | None = None
  rotated_norm_tpl: Template | None = None  # as qk_norm_tpl, after the rotation
  # a scale of the queries that depends on their positions; None means no scale
  position_scale_tpl: Template | None = None
  # splits the segments for this layer, as Chunks does; None: they stay as they are
  segments_tpl: Template | None = None
  # computes the context from queries, keys and values
  attention_tpl: Template = template_field(DotProductAttention)
  gate_tpl: Template | None = None  # computes factors of the context from x; None means no gate
  post_tpl: Template = template_field(Projection)  # the output projection, w [D, N, H]

  @nn.compact
  def __call__(
    self, x_BTD: jax.Array, positions_BT: jax.Array, segment_ids_BT: jax.Array | None = None
  ) -> jax.Array:
    query, key, value, start = self.heads(x_BTD, positions_BT)
    return self.attended(x_BTD, query, key, value, positions_BT, segment_ids_BT, start)

  # No methods of their own in a profile: a subclass calls the two as one layer, too.
  @nn.nowrap
  def heads(
    self, x_BTD: jax.Array, positions_BT: jax.Array
  ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | int]:
    """Returns queries [B, T, N, H], all keys and values [B, S, K, H], and the first query's slot.

    Where the layer has a cache, it has the new keys and values afterwards.
    """
    query, key, value = self.qkv_tpl(name='qkv')(x_BTD)
    if self.qk_norm_tpl is not None:
      query = self.qk_norm_tpl(name='query_norm')(query)
      key = self.qk_norm_tpl(name='key_norm')(key)
    if self.value_norm_tpl is not None:
      value = self.value_norm_tpl(name='value_norm')(value)
    if self.rotary_tpl is not None:
      rotary = self.rotary_tpl(name='rotary')
      query, key = rotary(query, positions_BT), rotary(key, positions_BT)
    if self.rotated_norm_tpl is not None:
      query = self.rotated_norm_tpl(name='query_norm')(query)
      key = self.rotated_norm_tpl(name='key_norm')(key)
    has_norm = self.qk_norm_tpl is not None or self.rotated_norm_tpl is not None
    if not has_norm:  # a norm needs what it is computed from, and both would be kept
      query, key, value = (checkpoint_name(x, 'attention_input') for x in (query, key, value))
    if self.query_scale_tpl is not None:
      query = self.query_scale_tpl(name='per_dim_scale')(query)
    if self.position_scale_tpl is not None:
      query = self.position_scale_tpl(name='position_scale')(query, positions_BT)
    start: jax.Array | int = 0
    if is_decoding(self):
      kept, start = append_stored(self, key=encoded(key), value=encoded(value))
      key, value = cast('list[jax.Array]', kept)  # or what attention takes in their place
    return query, key, value, start

  @nn.nowrap
  def attended(
    self,
    x_BTD: jax.Array,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    positions_BT: jax.Array,
    segment_ids_BT: jax.Array | None,
    start: jax.Array | int,
  ) -> jax.Array:
    """Returns what the queries read of the values, through the output projection, [B, T, D]."""
    if self.segments_tpl is not None:
      segment_ids_BT = self.segments_tpl()(positions_BT, segment_ids_BT, start)
    context = self.attention_tpl(name='dot_product')(query, key, value, segment_ids_BT, start)
    context = checkpoint_name(context, 'context')
    if self.gate_tpl is not None:
      context *= self.gate_tpl(name='gate')(x_BTD)
    context = shard(context, 'batch', 'length', 'act_heads', None)
    return to_output(self.post_tpl, context, (self.model_dims, self.num_heads, self.head_dim))


def is_decoding(module: nn.Module) -> bool:
  """Returns whether a layer of attention keeps what it computes for later tokens."""
  return module.is_mutable_collection('cache') and not module.is_initializing()


def append_to_cache(module: nn.Module, **new: jax.Array) -> tuple[list[jax.Array], jax.Array | int]:
  """Appends to the cache of a layer, as append_stored does, and returns arrays.

  Args:
    module: The layer.
    **new: What the layer keeps of the new tokens, [B, T, …, H] each.
  """
  kept, start = append_stored(module, **new)
  return [x.vectors() if isinstance(x, PagedVectors) else cast('jax.Array', x) for x in kept], start


def append_stored(
  module: nn.Module, **new: jax.Array | EncodedVectors
) -> tuple[list[Stored], jax.Array | int]:
  """Appends to the cache of a layer of attention, which calls it once.

  The cache has the tokens in the dimension before the last one, [B, K, S, H]: the products of one
  query with all keys of a head then read one block of memory. Where there is no cache yet, the new
  tokens are the first ones of their rows, and the cache has room for them alone. Otherwise the
  caller has put in `index`, [B], the number of tokens that each row has. Tokens beyond the room of
  a row are dropped. If it has put in `pages` too, [B, W], tokens lie in pages; see PagedVectors.

  Args:
    module: The layer.
    **new: What the layer keeps of the new tokens, [B, T, …, H] each, or EncodedVectors.

  Returns:
    The same of all slots, [B, S, …, H] each, in place of arrays also PagedVectors; and the slot of
    the first new token of each row, 0 or [B]. What lies behind a row's tokens has no meaning.
  """
  if not module.has_variable('cache', INDEX):
    rows = next(iter(new.values())).shape[0]
    module.variable('cache', INDEX, lambda: jnp.zeros(rows, jnp.int32))
    for name, x in (pair for given in new.items() for pair in arrays_of(*given).items()):
      module.variable('cache', name, functools.partial(jnp.moveaxis, x, 1, slot_axis(name)))
    return [*new.values()], 0
  start_B: jax.Array = module.get_variable('cache', INDEX)

  def append(name: str, new: jax.Array) -> jax.Array | PagedVectors:
    cached: nn.Variable = module.variable('cache', name)
    axis = slot_axis(name)
    if module.has_variable('cache', PAGES):
      table_BW: jax.Array = module.get_variable('cache', PAGES)
      paged = PagedVectors(cached.value, table_BW, start_B + new.shape[1], axis)
      pages = tpu_cached_attention.appended_to_pages(paged, new)
      cached.value = jax.lax.optimization_barrier(paged.appended(new) if pages is None else pages)
      return dataclasses.replace(paged, pages=cached.value)
    rows_B1, slots_BT = jnp.arange(new.shape[0])[:, None], start_B[:, None]
    slots_BT += jnp.arange(new.shape[1])
    heads = (slice(None),) * (cached.value.ndim + axis - 1)
    whole = tpu_cached_attention.appended(cached.value, new, start_B)
    if whole is None:
      whole = cached.value.at[rows_B1, *heads, slots_BT].set(new, mode='drop', unique_indices=True)
    # otherwise XLA for CPUs updates a copy for each use, in another shape
    cached.value = jax.lax.optimization_barrier(whole)
    return jnp.moveaxis(cached.value, axis, 1)

  def appended(name: str, new: jax.Array | EncodedVectors) -> Stored:
    parts = [append(*part) for part in arrays_of(name, new).items()]
    if len(parts) == 1:
      return parts[0]
    parts = [x.vectors() if isinstance(x, PagedVectors) else x for x in parts]
    stored: EncodedVectors = jax.tree.unflatten(jax.tree.structure(new), parts)
    return stored

  return [appended(name, x) for name, x in new.items()], start_B
