"""Causal self-attention: projections to queries, keys and values, the attention itself, and out."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from paxlite.layers.embeddings import cap_logits
from paxlite.layers.projection import Projection
from paxlite.partitioning import shard
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
  projection_tpl: Template = template_field(Projection)

  @nn.compact
  def __call__(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    def project(name: str, heads: int, axis: str) -> jax.Array:
      y_BTNH = self.projection_tpl(
        equation='BTD,DNH->BTNH',
        shape=(self.model_dims, heads, self.head_dim),
        axes=('embed', axis, 'head_dim'),
        name=name,
      )(x_BTD)
      return checkpoint_name(y_BTNH, f'{name}_proj')

    query = shard(project('query', self.num_heads, 'heads'), 'batch', 'length', 'act_heads', None)
    key = project('key', self.num_kv_heads, 'kv_heads')
    value = project('value', self.num_kv_heads, 'kv_heads')
    return query, key, value


class DotProductAttention(nn.Module):
  """softmax(cap(q·k) + mask)·v in plain XLA, with the softmax in float32.

  Attributes:
    query_scale: Multiplies the queries.
    logit_cap: cap · tanh(logits / cap) before the softmax; off where ≤ 0.
    dropout: Rate on the attention weights.
  """

  query_scale: float
  logit_cap: float = 0.0
  dropout: float = 0.0

  @nn.compact
  def __call__(
    self,
    q_BTNH: jax.Array,
    k_BSGH: jax.Array,
    v_BSGH: jax.Array,
    segment_ids_BT: jax.Array | None = None,
  ) -> jax.Array:
    """Returns the context [B, T, N, H]; a query sees earlier keys of its own segment alone."""
    B, T, N, H = q_BTNH.shape
    G = k_BSGH.shape[2]
    q_BTNH = q_BTNH * self.query_scale
    if G == N:
      scores_BNTS = jnp.einsum('BTNH,BSNH->BNTS', q_BTNH, k_BSGH)
    else:  # each key head serves N // G neighbouring queries; K counts them
      q_BTGKH = q_BTNH.reshape(B, T, G, N // G, H)
      scores_BNTS = jnp.einsum('BTGKH,BSGH->BGKTS', q_BTGKH, k_BSGH).reshape(B, N, T, T)
    scores_BNTS = cap_logits(scores_BNTS.astype(jnp.float32), self.logit_cap)
    mask = jnp.tril(jnp.ones((T, T), bool))
    if segment_ids_BT is not None:
      same = segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :]
      mask = (mask & same)[:, None]
    weights_BNTS = jax.nn.softmax(jnp.where(mask, scores_BNTS, -1e30), axis=-1)
    dropout = nn.Dropout(self.dropout, deterministic=not self.has_rng('dropout'))
    weights_BNTS = dropout(weights_BNTS.astype(v_BSGH.dtype))
    if G == N:
      return jnp.einsum('BNTS,BSNH->BTNH', weights_BNTS, v_BSGH)
    weights_BGKTS = weights_BNTS.reshape(B, G, N // G, T, T)
    return jnp.einsum('BGKTS,BSGH->BTGKH', weights_BGKTS, v_BSGH).reshape(B, T, N, H)


class Attention(nn.Module):
  """Multi-head causal self-attention, [B, T, D] to [B, T, D].

  Attributes:
    model_dims: D.
    num_heads: N.
    head_dim: H.
    qkv_tpl: Makes queries, keys and values.
    rotary_tpl: Rotates queries and keys by their position; None for models without.
    attention_tpl: The attention itself.
    post_tpl: The output projection, w [D, N, H].
  """

  model_dims: int
  num_heads: int
  head_dim: int
  qkv_tpl: Template = template_field(CombinedQkv)
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
    context = self.attention_tpl(name='dot_product')(query, key, value, segment_ids_BT)
    context = checkpoint_name(context, 'context')
    context = shard(context, 'batch', 'length', 'act_heads', None)
    out_BTD = self.post_tpl(
      equation='BTNH,DNH->BTD',
      shape=(self.model_dims, self.num_heads, self.head_dim),
      axes=('embed', 'heads', 'head_dim'),
      name='post',
    )(context)
    return checkpoint_name(shard(out_BTD, 'batch', 'length', 'act_embed'), 'out_proj')
