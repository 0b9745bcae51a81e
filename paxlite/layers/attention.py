"""Causal self-attention: projections to queries, keys and values, the attention itself, and out.

With a mutable collection 'cache' attention also keeps keys and values for the tokens to come; see
Attention.
"""

import math

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from paxlite.layers.embeddings import cap_logits
from paxlite.layers.projection import Projection
from paxlite.partitioning import param, shard
from paxlite.templates import Template, template_field


class CombinedQkv(nn.Module):
  """Queries, keys and values by one weight [3, D, N, H]: [B, T, D] to three of [B, T, N, H]."""

  model_dims: int
  num_heads: int
  head_dim: int
  projection_tpl: Template = template_field(Projection)

  @nn.compact
  def __call__(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    shape = (3, self.model_dims, self.num_heads, self.head_dim)
    qkv_KBTNH = self.projection_tpl(
      equation='BTD,KDNH->KBTNH',
      shape=shape,
      axes=('qkv', 'embed', 'heads', 'head_dim'),
      name='combined',
    )(x_BTD)
    qkv_KBTNH = checkpoint_name(qkv_KBTNH, 'combined_qkv_proj')
    qkv_KBTNH = shard(qkv_KBTNH, None, 'batch', 'length', 'act_heads', None)
    return qkv_KBTNH[0], qkv_KBTNH[1], qkv_KBTNH[2]


class SeparateQkv(nn.Module):
  """Queries [B, T, N, H], keys and values [B, T, G, H] by three weights (grouped queries)."""

  model_dims: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  query_tpl: Template = template_field(Projection)
  key_value_tpl: Template = template_field(Projection)

  @nn.compact
  def __call__(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    def project(projection_tpl: Template, name: str, heads: int, axis: str) -> jax.Array:
      y_BTNH = projection_tpl(
        equation='BTD,DNH->BTNH',
        shape=(self.model_dims, heads, self.head_dim),
        axes=('embed', axis, 'head_dim'),
        name=name,
      )(x_BTD)
      return checkpoint_name(y_BTNH, f'{name}_proj')

    query = project(self.query_tpl, 'query', self.num_heads, 'heads')
    key = project(self.key_value_tpl, 'key', self.num_kv_heads, 'kv_heads')
    value = project(self.key_value_tpl, 'value', self.num_kv_heads, 'kv_heads')
    return shard(query, 'batch', 'length', 'act_heads', None), key, value


class PerDimScale(nn.Module):
  """Queries × softplus(per_dim_scale) / ln 2, per_dim_scale [H] starting at 0 (a factor of 1).

  Pax's base class of language models learns this scale; [B, T, N, H] to the same.
  """

  @nn.compact
  def __call__(self, q_BTNH: jax.Array) -> jax.Array:
    w = param(self, 'per_dim_scale', nn.initializers.zeros, q_BTNH.shape[-1:], ['head_dim'])
    return q_BTNH * (jax.nn.softplus(w) / math.log(2)).astype(q_BTNH.dtype)


class DotProductAttention(nn.Module):
  """softmax(cap(q·k) + mask)·v in plain XLA, with the softmax in float32.

  Attributes:
    query_scale: Multiplies the queries.
    logit_cap: cap · tanh(logits / cap) before the softmax; off where ≤ 0.
    window: A query sees this many of the latest keys, its own included; all where ≤ 0.
    dropout: Rate on the attention weights.
  """

  query_scale: float
  logit_cap: float = 0.0
  window: int = 0
  dropout: float = 0.0

  @nn.compact
  def __call__(
    self,
    q_BTNH: jax.Array,
    k_BSGH: jax.Array,
    v_BSGH: jax.Array,
    segment_ids_BT: jax.Array | None = None,
    key_segment_ids_BS: jax.Array | None = None,
    start: jax.Array | int = 0,
  ) -> jax.Array:
    """Returns the context [B, T, N, H]; a query sees earlier keys of its own segment alone.

    Args:
      q_BTNH: Queries.
      k_BSGH: Keys, for N // G neighbouring query heads each.
      v_BSGH: Values.
      segment_ids_BT: Of the queries.
      key_segment_ids_BS: Of the keys; None where they are the queries' own.
      start: Index among the keys of the first query.
    """
    B, T, N, H = q_BTNH.shape
    S, G = k_BSGH.shape[1:3]
    q_BTNH = q_BTNH * self.query_scale
    if G == N:
      scores_BNTS = jnp.einsum('BTNH,BSNH->BNTS', q_BTNH, k_BSGH)
    else:  # each key head serves N // G neighbouring queries; K counts them
      q_BTGKH = q_BTNH.reshape(B, T, G, N // G, H)
      scores_BNTS = jnp.einsum('BTGKH,BSGH->BGKTS', q_BTGKH, k_BSGH).reshape(B, N, T, S)
    scores_BNTS = cap_logits(scores_BNTS.astype(jnp.float32), self.logit_cap)
    distance = start + jnp.arange(T)[:, None] - jnp.arange(S)
    mask = distance >= 0
    if self.window > 0:
      mask &= distance < self.window
    if segment_ids_BT is not None:
      keys = segment_ids_BT if key_segment_ids_BS is None else key_segment_ids_BS
      mask = (mask & (segment_ids_BT[:, :, None] == keys[:, None, :]))[:, None]
    weights_BNTS = jax.nn.softmax(jnp.where(mask, scores_BNTS, -1e30), axis=-1)
    dropout = nn.Dropout(self.dropout, deterministic=not self.has_rng('dropout'))
    weights_BNTS = dropout(weights_BNTS.astype(v_BSGH.dtype))
    if G == N:
      return jnp.einsum('BNTS,BSNH->BTNH', weights_BNTS, v_BSGH)
    weights_BGKTS = weights_BNTS.reshape(B, G, N // G, T, S)
    return jnp.einsum('BGKTS,BSGH->BTGKH', weights_BGKTS, v_BSGH).reshape(B, T, N, H)


class Attention(nn.Module):
  """Multi-head causal self-attention, [B, T, D] to [B, T, D].

  Where the caller makes the collection 'cache' mutable, the first call leaves keys, values and
  segment ids of its T tokens there, and later calls append theirs at `index` and attend to all:
  the caller pads those arrays along their length to what is to fit in. segment_ids are needed.

  Attributes:
    model_dims: D.
    num_heads: N.
    head_dim: H.
    qkv_tpl: Makes queries, keys and values.
    query_scale_tpl: A learned scale of the queries; None for models without.
    rotary_tpl: Rotates queries and keys by their position; None for models without.
    attention_tpl: The attention itself.
    post_tpl: The output projection, w [D, N, H].
  """

  model_dims: int
  num_heads: int
  head_dim: int
  qkv_tpl: Template = template_field(CombinedQkv)
  query_scale_tpl: Template | None = None
  rotary_tpl: Template | None = None
  attention_tpl: Template = template_field(DotProductAttention)
  post_tpl: Template = template_field(Projection)

  @nn.compact
  def __call__(
    self, x_BTD: jax.Array, positions_BT: jax.Array, segment_ids_BT: jax.Array | None = None
  ) -> jax.Array:
    query, key, value = self.qkv_tpl(name='qkv')(x_BTD)
    if self.rotary_tpl is not None:
      rotary = self.rotary_tpl(name='rotary')
      query, key = rotary(query, positions_BT), rotary(key, positions_BT)
    if self.query_scale_tpl is not None:
      query = self.query_scale_tpl(name='per_dim_scale')(query)
    cached: list[jax.Array] = []
    if self.is_mutable_collection('cache') and not self.is_initializing():
      key, value, *cached = self._append_to_cache(key, value, segment_ids_BT)
    context = self.attention_tpl(name='dot_product')(query, key, value, segment_ids_BT, *cached)
    context = checkpoint_name(context, 'context')
    context = shard(context, 'batch', 'length', 'act_heads', None)
    out_BTD = self.post_tpl(
      equation='BTNH,DNH->BTD',
      shape=(self.model_dims, self.num_heads, self.head_dim),
      axes=('embed', 'heads', 'head_dim'),
      name='post',
    )(context)
    return checkpoint_name(shard(out_BTD, 'batch', 'length', 'act_embed'), 'out_proj')

  def _append_to_cache(
    self, key_BTGH: jax.Array, value_BTGH: jax.Array, segment_ids_BT: jax.Array | None
  ) -> tuple[jax.Array, ...]:
    """Keys, values and segment ids of all tokens so far, and the index of the first new one."""
    assert segment_ids_BT is not None
    is_first = not self.has_variable('cache', 'index')
    index = self.variable('cache', 'index', lambda: jnp.zeros((), jnp.int32))
    start = index.value

    def append(name: str, new: jax.Array) -> jax.Array:
      cached = self.variable('cache', name, lambda: new)
      if not is_first:
        cached.value = jax.lax.dynamic_update_slice_in_dim(cached.value, new, start, axis=1)
      return cached.value

    index.value = start + key_BTGH.shape[1]
    new = {'key': key_BTGH, 'value': value_BTGH, 'segment_ids': segment_ids_BT}
    return *(append(name, x) for name, x in new.items()), start
