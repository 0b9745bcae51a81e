"""DeepSeek-V4's attention: one key, which is the value too, for all heads, and keys of windows.

A query sees the latest tokens, and by one key each windows of `rate` tokens, which begin with its
text and are found by positions. Caches keep what they are made of: tokens or drafts complete them.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from paxlite.config.templates import Template, template_field
from paxlite.core.training_rules import never_trained
from paxlite.experiments.deepseek_sparse.layers import index_scores
from paxlite.layers.attention.attention import (
  AttentionSinks,
  DotProductAttention,
  append_to_cache,
  is_decoding,
)
from paxlite.layers.attention.softmax_attention import AttentionMask, Softmax, attend
from paxlite.layers.norms import RmsNorm, UnscaledRmsNorm
from paxlite.layers.projection import Projection
from paxlite.layers.rotary import RotaryEmbedding
from paxlite.parallel.partitioning import param, shard, shards_of

INDEXER = never_trained('indexer')  # the module whose choice of keys has no gradient
_HIDDEN = -1e30  # as where a mask hides a key


@dataclasses.dataclass(frozen=True)
class Windows:
  """The complete windows of rows of S tokens, in the order of their tokens."""

  rate: int  # the tokens of a window
  # the slot of the last token of each window, [B or 1, W]; S or more: there is none
  last_BW: jax.Array
  position_BW: jax.Array  # the position of the first token of each
  # whether the window before is of the same text, and ends where this one begins
  follows_BW: jax.Array
  # the segments of the queries [B, T], and of the windows [B, W]; None: rows are texts, whose
  # windows begin at the slots 0, rate, 2 · rate …
  segments: tuple[jax.Array, jax.Array] | None = None

  def cut(self, x_BSX: jax.Array) -> jax.Array:
    """Returns the tokens of each window, [B, S, X] to [B, W, rate, X]."""
    B, S, X = x_BSX.shape
    W = self.last_BW.shape[1]
    if self.segments is None:
      return x_BSX[:, : W * self.rate].reshape(B, W, self.rate, X)
    slot_BWr = self.last_BW[..., None] + jnp.arange(1 - self.rate, 1)
    slot_BR = jnp.clip(slot_BWr, 0, S - 1).reshape(B, W * self.rate)
    return jnp.take_along_axis(x_BSX, slot_BR[..., None], 1).reshape(B, W, self.rate, X)

  def visible(self, tokens: int, start: jax.Array | int) -> jax.Array:
    """Returns whether a query sees a window, [B or 1, T, W]: if the window does not end behind it.

    Args:
      tokens: T.
      start: The slot of the first query, 0 or [B].
    """
    slot_BT = jnp.reshape(jnp.asarray(start), (-1, 1)) + jnp.arange(tokens)
    visible_BTW = self.last_BW[:, None] <= slot_BT[..., None]
    if self.segments is None:
      return visible_BTW
    of_queries_BT, of_windows_BW = self.segments
    return visible_BTW & (of_queries_BT[..., None] == of_windows_BW[:, None])


def windows(
  rate: int, slots: int, positions_BT: jax.Array, segment_ids_BT: jax.Array | None
) -> Windows:
  """Returns the complete windows of rows.

  Args:
    rate: The tokens of a window.
    slots: S, the tokens of a row.
    positions_BT: The positions of the tokens; they are read where there are segments.
    segment_ids_BT: Their segments, where S = T; 0 is padding. None: a row is one text.
  """
  W = slots // rate
  if segment_ids_BT is None:
    first_1W = jnp.arange(W)[None] * rate
    return Windows(rate, first_1W + rate - 1, first_1W, first_1W > 0)
  B, T = segment_ids_BT.shape
  positions_BT = jnp.broadcast_to(positions_BT, (B, T))
  slot_T = jnp.arange(T)
  before_BT = jnp.pad(segment_ids_BT, [(0, 0), (rate - 1, 0)])[:, :T]
  is_last_BT = (positions_BT + 1) % rate == 0
  is_last_BT &= (slot_T >= rate - 1) & (segment_ids_BT > 0) & (before_BT == segment_ids_BT)
  last_BW = jnp.sort(jnp.where(is_last_BT, slot_T, T), axis=1)[:, :W]
  of = lambda x_BT: jnp.take_along_axis(x_BT, jnp.minimum(last_BW, T - 1), 1)
  segment_BW = of(segment_ids_BT)
  before = lambda x_BW: jnp.pad(x_BW, [(0, 0), (1, 0)], constant_values=-1)[:, :W]
  follows_BW = (before(last_BW) == last_BW - rate) & (before(segment_BW) == segment_BW)
  position_BW = of(positions_BT) - (rate - 1)
  return Windows(rate, last_BW, position_BW, follows_BW, (segment_ids_BT, segment_BW))


class KeyCompressor(nn.Module):
  """Keys of windows, [B, T, D] to [B, W, H]: norm(Σ_j softmax_j(w_gate·x_j + b_j) ⊙ w·x_j).

  The softmax is over the tokens j of a window, in each of the H dimensions, in float32. The bias b
  is [rate, H]. Keys are rotated by the position of the first token of their window.
  """

  model_dims: int  # D
  head_dim: int  # H
  projection_tpl: Template = template_field(Projection)  # template of both projections
  norm_tpl: Template = template_field(RmsNorm)  # the norm of the keys
  rotary_tpl: Template = template_field(RotaryEmbedding)  # rotates keys by positions

  @property
  def width(self) -> int:
    """The number of values and of gates of a token."""
    return self.head_dim

  @nn.compact
  def __call__(self, x_BTD: jax.Array, of: Windows) -> jax.Array:
    """Returns the keys [B, W, H] of the windows of the rows, with what a cache has of them."""
    value_BSX, gate_BSX = (
      self.projection_tpl(
        equation='BTD,DH->BTH', shape=(self.model_dims, self.width), axes=('embed', None), name=name
      )(x_BTD)
      for name in ('value', 'gate')
    )
    if is_decoding(self):
      (value_BSX, gate_BSX), _ = append_to_cache(self, values=value_BSX, gates=gate_BSX)
    b_rX = param(self, 'b', nn.initializers.zeros, [of.rate, self.width], [None, None])
    gate_BWrX = of.cut(gate_BSX).astype(jnp.float32) + b_rX
    value_BWnH, gate_BWnH = self.terms(of.cut(value_BSX), gate_BWrX, of.follows_BW)
    weight_BWnH = jax.nn.softmax(gate_BWnH, axis=2).astype(value_BWnH.dtype)
    key_BWH = self.norm_tpl(name='norm')((value_BWnH * weight_BWnH).sum(2))
    rotated_BW1H = self.rotary_tpl(name='rotary')(key_BWH[:, :, None], of.position_BW)
    return shard(rotated_BW1H[:, :, 0], 'batch', 'kv_length', None)

  def terms(
    self, value_BWrX: jax.Array, gate_BWrX: jax.Array, follows_BW: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Returns the values that a key is a sum of, and the arguments of their softmax.

    Args:
      value_BWrX: The values of the tokens of each window.
      gate_BWrX: Their gates.
      follows_BW: As in Windows.
    """
    del follows_BW
    return value_BWrX, gate_BWrX


class OverlappingKeyCompressor(KeyCompressor):
  """A KeyCompressor whose keys are sums over their own window and the one before it.

  A token has 2 · H values and gates: the first half for the key of the next window, the second half
  for that of its own. The first window of a text has no window before it.
  """

  @property
  def width(self) -> int:
    return 2 * self.head_dim

  def terms(
    self, value_BWrX: jax.Array, gate_BWrX: jax.Array, follows_BW: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    before = lambda x: jnp.pad(x, [(0, 0), (1, 0), (0, 0), (0, 0)])[:, :-1]
    value_next, value_own = jnp.split(value_BWrX, 2, axis=-1)
    gate_next, gate_own = jnp.split(gate_BWrX, 2, axis=-1)
    gate_before = jnp.where(follows_BW[..., None, None], before(gate_next), _HIDDEN)
    return (
      jnp.concatenate([before(value_next), value_own], axis=2),
      jnp.concatenate([gate_before, gate_own], axis=2),
    )


class WindowIndexer(nn.Module):
  """Chooses the windows that score highest for a query, of those that it may see.

  The score is that of SparseIndexer, with a key for each window. Of equal scores, the earlier
  window comes first. A choice has no gradient: nothing here learns from the loss of the model.
  """

  model_dims: int  # D
  query_latent_dims: int  # Q, the width of a latent of attention's queries
  num_heads: int  # N
  head_dim: int  # H
  top_k: int  # how many windows a query sees; with at most so many, it sees all
  keys_tpl: Template = template_field(OverlappingKeyCompressor)  # computes the keys of windows
  projection_tpl: Template = template_field(Projection)  # template of the other projections
  rotary_tpl: Template = template_field(RotaryEmbedding)  # rotates queries by their positions

  @nn.compact
  def __call__(
    self,
    x_BTD: jax.Array,
    latent_BTQ: jax.Array,
    positions_BT: jax.Array,
    of: Windows,
    visible_BTW: jax.Array,
  ) -> jax.Array:
    """Returns whether a query sees a window, [B, T, W].

    Args:
      x_BTD: The activations.
      latent_BTQ: The latents of attention's queries.
      positions_BT: The positions of the tokens.
      visible_BTW: Whether a query may see a window.
    """
    W, N, H = visible_BTW.shape[-1], self.num_heads, self.head_dim
    has_all = self.top_k >= W and not self.is_initializing()
    if has_all and not is_decoding(self):
      return visible_BTW
    x_BTD, latent_BTQ = jax.lax.stop_gradient((x_BTD, latent_BTQ))
    keys = self.keys_tpl(model_dims=self.model_dims, head_dim=H, name='keys')
    key_BWH = keys(x_BTD, of)  # into the cache in any case
    if has_all:
      return visible_BTW
    shape, axes = (self.query_latent_dims, N, H), ('embed', 'heads', 'head_dim')
    query = self.projection_tpl(equation='BTQ,QNH->BTNH', shape=shape, axes=axes, name='query')
    query_BTNH = self.rotary_tpl(name='rotary')(query(latent_BTQ), positions_BT)
    weight_BTN = self.projection_tpl(
      equation='BTD,DN->BTN', shape=(self.model_dims, N), axes=('embed', None), name='weights'
    )(x_BTD)
    score_BTW = index_scores(query_BTNH, weight_BTN, key_BWH)
    _, best_BTk = jax.lax.top_k(jnp.where(visible_BTW, score_BTW, -jnp.inf), min(self.top_k, W))
    chosen_BTW = jnp.zeros(score_BTW.shape, bool)
    chosen_BTW = jnp.put_along_axis(chosen_BTW, best_BTk, True, axis=-1, inplace=False)
    return shard(chosen_BTW & visible_BTW, 'batch', 'length', None)


_BLOCK = 512  # queries that are computed at a time, where no number is asked for


class SharedKeyAttention(nn.Module):
  """Causal self-attention with one key for all heads, [B, T, D] to [B, T, D].

  Queries come from latents [B, T, Q], and have a norm without a scale. As the key is also the
  value, what a query reads is rotated; it is rotated back by the position of the query. The output
  projection has two steps: each of G groups of heads is projected to [R], and these to D.
  """

  model_dims: int  # D
  num_heads: int  # N
  head_dim: int  # H
  query_latent_dims: int  # Q
  num_groups: int  # G
  group_dims: int  # R
  projection_tpl: Template = template_field(Projection)  # template of all projections but one
  # the projection of groups of heads, each by a weight of its own
  groups_tpl: Template = template_field(Projection)
  norm_tpl: Template = template_field(RmsNorm)  # template of the norms of latents and keys
  query_norm_tpl: Template = template_field(UnscaledRmsNorm)  # the norm of the queries of each head
  # rotates queries, keys and what is read by positions
  rotary_tpl: Template = template_field(RotaryEmbedding)
  # computes what is read of the keys of the latest tokens, as DotProductAttention, or of windows
  # too, as WindowAttention
  attention_tpl: Template = template_field(DotProductAttention)
  rate: int = 1  # the tokens of a window
  keys_tpl: Template | None = None  # computes the keys of windows; None: there are none
  # chooses the windows that a query sees, as WindowIndexer; None: it sees all
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
        select = self.selection_tpl(name=INDEXER)
        visible_BTW = select(x_BTD, latent_BTQ, positions_BT, of, visible_BTW)
      context_BTNH = attention(
        query_BTNH, key_BS1H, of_windows_BWH, of, visible_BTW, segment_ids_BT, start
      )
    context_BTNH = rotary(checkpoint_name(context_BTNH, 'context'), -positions_BT)
    context_BTGnH = context_BTNH.reshape(B, T, G, N // G, H)
    context_BTGnH = shard(context_BTGnH, 'batch', 'length', 'act_heads', None, None)
    groups_BTGR = self.groups_tpl(
      equation='BTGNH,GNHR->BTGR', shape=(G, N // G, H, R), axes=('heads', None, None, 'embed'),
      name='post_groups',
    )(context_BTGnH)  # fmt: skip
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
  """

  query_scale: float  # factor of the queries
  window: int  # a query sees this many of the latest tokens, including its own
  # the logit of a virtual key for each head, [N], whose value is 0
  sinks_tpl: Template = template_field(AttentionSinks)
  dropout: float = 0.0  # dropout rate of the attention weights
  # queries that are computed at a time, whose scores the backward pass computes again; 0: 512, if
  # the row can be cut so, without computing again
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
      visible_BTW: Whether a query sees a window.
      segment_ids_BT: Segments of the tokens; a query sees only those of its own segment.
      start: The slot of the first query, 0 or [B].
    """
    T, S = query_BTNH.shape[1], key_BS1H.shape[1]
    drops = self.dropout > 0 and self.has_rng('dropout')
    softmax = Softmax(
      self.query_scale, window=self.window, sink_logit=self.sinks_tpl(name='sinks')(),
      dropout=nn.Dropout(self.dropout, deterministic=False) if drops else None,
    )  # fmt: skip
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
