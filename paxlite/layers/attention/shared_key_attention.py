"""DeepSeek-V4's attention: one key, which is the value too, for all heads, and keys of windows.

A query sees the latest tokens, and windows of the text before it, each by one key; see
compressed_keys. There is a sink for each head.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from paxlite.config.templates import Template, template_field
from paxlite.layers.attention.attention import (
  AttentionSinks,
  DotProductAttention,
  append_to_cache,
  is_decoding,
)
from paxlite.layers.attention.compressed_keys import Windows, windows
from paxlite.layers.attention.softmax_attention import AttentionMask, Softmax, attend
from paxlite.layers.norms import RmsNorm, UnscaledRmsNorm
from paxlite.layers.projection import Projection
from paxlite.layers.rotary import RotaryEmbedding
from paxlite.parallel.partitioning import shard, shards_of

_BLOCK = 512  # queries that are computed at a time, where no number is asked for


class SharedKeyAttention(nn.Module):
  """Causal self-attention with one key for all heads, [B, T, D] to [B, T, D].

  Queries come from latents [B, T, Q], and have a norm without a scale. As the key is also the
  value, what a query reads is rotated; it is rotated back by the position of the query. The output
  projection has two steps: each of G groups of heads is projected to [R], and these to D.

  Attributes:
    model_dims: D.
    num_heads: N.
    head_dim: H.
    query_latent_dims: Q.
    num_groups: G.
    group_dims: R.
    projection_tpl: Template of all projections but one.
    groups_tpl: The projection of groups of heads, each by a weight of its own.
    norm_tpl: Template of the norms of latents and keys.
    query_norm_tpl: The norm of the queries of each head.
    rotary_tpl: Rotates queries, keys and what is read by positions.
    attention_tpl: Computes what is read of the keys of the latest tokens, as DotProductAttention,
      or of windows too, as WindowAttention.
    rate: The tokens of a window.
    keys_tpl: Computes the keys of windows; None: there are none.
    selection_tpl: Chooses the windows that a query sees, as WindowIndexer; None: it sees all.
  """

  model_dims: int
  num_heads: int
  head_dim: int
  query_latent_dims: int
  num_groups: int
  group_dims: int
  projection_tpl: Template = template_field(Projection)
  groups_tpl: Template = template_field(Projection)
  norm_tpl: Template = template_field(RmsNorm)
  query_norm_tpl: Template = template_field(UnscaledRmsNorm)
  rotary_tpl: Template = template_field(RotaryEmbedding)
  attention_tpl: Template = template_field(DotProductAttention)
  rate: int = 1
  keys_tpl: Template | None = None
  selection_tpl: Template | None = None

  @nn.compact
  def __call__(
    self, x_BTD: jax.Array, positions_BT: jax.Array, segment_ids_BT: jax.Array | None = None
  ) -> jax.Array:
    D, N, H, Q = self.model_dims, self.num_heads, self.head_dim, self.query_latent_dims
    G, R = self.num_groups, self.group_dims
    B, T = x_BTD.shape[:2]
    rotary = self.rotary_tpl(name='rotary')
    latent_BTQ = self._project('query_latent', 'BTD,DQ->BTQ', (D, Q), ('embed', None))(x_BTD)
    latent_BTQ = self.norm_tpl(name='query_latent_norm')(latent_BTQ)
    axes = 'embed', 'heads', 'head_dim'
    query_BTNH = self._project('query', 'BTQ,QNH->BTNH', (Q, N, H), axes)(latent_BTQ)
    query_BTNH = self.query_norm_tpl(name='query_norm')(checkpoint_name(query_BTNH, 'query_proj'))
    query_BTNH = shard(rotary(query_BTNH, positions_BT), 'batch', 'length', 'act_heads', None)
    key_BTH = self._project('key', 'BTD,DH->BTH', (D, H), ('embed', None))(x_BTD)
    key_BTH = self.norm_tpl(name='key_norm')(checkpoint_name(key_BTH, 'key_proj'))
    key_BS1H = rotary(key_BTH[:, :, None], positions_BT)
    start: jax.Array | int = 0
    if is_decoding(self):
      (key_BS1H,), start = append_to_cache(self, keys=key_BS1H)
    attention = self.attention_tpl(name='dot_product')
    if self.keys_tpl is None:
      context_BTNH = attention(query_BTNH, key_BS1H, key_BS1H, segment_ids_BT, start)
    else:
      of = windows(self.rate, key_BS1H.shape[1], positions_BT, segment_ids_BT)
      of_windows_BWH = self.keys_tpl(model_dims=D, head_dim=H, name='window_keys')(x_BTD, of)
      visible_BTW = of.visible(T, start)
      if self.selection_tpl is not None:
        select = self.selection_tpl(name='indexer')
        visible_BTW = select(x_BTD, latent_BTQ, positions_BT, of, visible_BTW)
      context_BTNH = attention(
        query_BTNH, key_BS1H, of_windows_BWH, of, visible_BTW, segment_ids_BT, start
      )
    context_BTNH = rotary(checkpoint_name(context_BTNH, 'context'), -positions_BT)
    context_BTGnH = context_BTNH.reshape(B, T, G, N // G, H)
    context_BTGnH = shard(context_BTGnH, 'batch', 'length', 'act_heads', None, None)
    groups_BTGR = self.groups_tpl(
      equation='BTGNH,GNHR->BTGR',
      shape=(G, N // G, H, R),
      axes=('heads', None, None, 'embed'),
      name='post_groups',
    )(context_BTGnH)
    groups_BTGR = shard(groups_BTGR, 'batch', 'length', 'act_heads', None)
    out_BTD = self._project('post', 'BTGR,DGR->BTD', (D, G, R), axes)(groups_BTGR)
    return checkpoint_name(shard(out_BTD, 'batch', 'residual_length', 'act_embed'), 'out_proj')

  def _project(
    self, name: str, equation: str, shape: tuple[int, ...], axes: tuple[str | None, ...]
  ) -> nn.Module:
    return self.projection_tpl(equation=equation, shape=shape, axes=axes, name=name)


class WindowAttention(nn.Module):
  """Attention to the keys of the latest tokens and to those of windows, which are the values too.

  It is computed in plain XLA, in blocks of queries. A block has the keys of the tokens that one of
  its queries sees, and of all windows that end before it does.

  Attributes:
    query_scale: Factor of the queries.
    window: A query sees this many of the latest tokens, including its own.
    sinks_tpl: The logit of a virtual key for each head, [N], whose value is 0.
    dropout: Dropout rate of the attention weights.
    block_size: Queries that are computed at a time, whose scores the backward pass computes again;
      0: 512, if the row can be cut so, without computing again.
  """

  query_scale: float
  window: int
  sinks_tpl: Template = template_field(AttentionSinks)
  dropout: float = 0.0
  block_size: int = 0

  @nn.compact
  def __call__(
    self,
    query_BTNH: jax.Array,
    key_BS1H: jax.Array,
    of_windows_BWH: jax.Array,
    of: Windows,
    visible_BTW: jax.Array,
    segment_ids_BT: jax.Array | None = None,
    start: jax.Array | int = 0,
  ) -> jax.Array:
    """Returns the context [B, T, N, H].

    Args:
      query_BTNH: Queries.
      key_BS1H: Keys of tokens.
      of_windows_BWH: Keys of windows.
      of: The windows.
      visible_BTW: Whether a query sees a window.
      segment_ids_BT: Segments of the tokens; a query sees only those of its own segment.
      start: The slot of the first query, 0 or [B].
    """
    T, S = query_BTNH.shape[1], key_BS1H.shape[1]
    drops = self.dropout > 0 and self.has_rng('dropout')
    softmax = Softmax(
      self.query_scale,
      window=self.window,
      sink_logit=self.sinks_tpl(name='sinks')(),
      dropout=nn.Dropout(self.dropout, deterministic=False) if drops else None,
    )
    key_BS1H = shard(key_BS1H, 'batch', 'kv_length', None, None)
    size = self.block_size or _BLOCK
    # where devices share a row, each computes its own queries at a time
    is_cut = isinstance(start, int) and T == S and T % size == 0 and not drops
    is_cut &= shards_of('length', T) == 1
    size = size if is_cut else T

    def block(
      first: int, from_key: int, query: jax.Array, keys: jax.Array, seen: jax.Array
    ) -> jax.Array:
      """Returns the context of some queries; keys are those of tokens, and then of windows."""
      length, tokens = query.shape[1], keys.shape[1] - seen.shape[2]
      segments = None
      if segment_ids_BT is not None:
        of_queries = segment_ids_BT[:, first : first + length]
        segments = of_queries, segment_ids_BT[:, from_key : from_key + tokens]
      mask = AttentionMask(start + first - from_key, self.window, segments).mask(length, tokens)
      masks = [mask if mask.ndim == 4 else mask[None, None], seen[:, None]]
      rows = max(map(len, masks))
      mask = jnp.concatenate([jnp.broadcast_to(m, (rows, *m.shape[1:])) for m in masks], -1)
      return attend(query, keys, keys, mask, None, softmax)

    contexts = []
    for first in range(0, T, size):
      stop, from_key, to_key, number = first + size, 0, S, of_windows_BWH.shape[1]
      if is_cut:
        from_key, to_key = max(0, first - self.window + 1), stop
        number = stop // of.rate if of.segments is None else number
      compute: Callable[..., jax.Array] = functools.partial(block, first, from_key)
      if self.block_size:
        compute = jax.checkpoint(compute)
      keys = [key_BS1H[:, from_key:to_key], of_windows_BWH[:, :number, None]]
      query, seen = query_BTNH[:, first:stop], visible_BTW[:, first:stop, :number]
      contexts.append(compute(query, jnp.concatenate(keys, 1), seen))
    return contexts[0] if len(contexts) == 1 else jnp.concatenate(contexts, axis=1)
