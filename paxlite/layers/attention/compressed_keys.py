"""Keys that each stand for a window of the text, and which queries see them.

A text is cut into windows of `rate` tokens, from its first token on. A window that is complete has
one key, which is the value too. The tokens behind the last complete window have none.

Packed rows. The windows of a text begin with the text and not with the row, at any slot: a row of T
tokens has at most T / rate of them, which are found by the positions of the tokens. A window has
the tokens of one text alone, and is seen by the queries of that text alone. So a text in a packed
row has the keys that it has alone.

Decoding. The cache keeps what the windows are made of, for each token. So it has as many slots as
other caches, and windows may be completed token by token, by drafts, or not at all.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import linen as nn

from paxlite.config.templates import Template, template_field
from paxlite.layers.attention.attention import append_to_cache, is_decoding
from paxlite.layers.norms import RmsNorm
from paxlite.layers.projection import Projection
from paxlite.layers.rotary import RotaryEmbedding
from paxlite.parallel.partitioning import param, shard

_HIDDEN = -1e30  # as where a mask hides a key


@dataclasses.dataclass(frozen=True)
class Windows:
  """The complete windows of rows of S tokens, in the order of their tokens.

  Attributes:
    rate: The tokens of a window.
    last_BW: The slot of the last token of each window, [B or 1, W]; S or more: there is none.
    position_BW: The position of the first token of each.
    follows_BW: Whether the window before is of the same text, and ends where this one begins.
    segments: The segments of the queries [B, T], and of the windows [B, W]; None: rows are texts,
      whose windows begin at the slots 0, rate, 2 · rate …
  """

  rate: int
  last_BW: jax.Array
  position_BW: jax.Array
  follows_BW: jax.Array
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

  Attributes:
    model_dims: D.
    head_dim: H.
    projection_tpl: Template of both projections.
    norm_tpl: The norm of the keys.
    rotary_tpl: Rotates keys by positions.
  """

  model_dims: int
  head_dim: int
  projection_tpl: Template = template_field(Projection)
  norm_tpl: Template = template_field(RmsNorm)
  rotary_tpl: Template = template_field(RotaryEmbedding)

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
