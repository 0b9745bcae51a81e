"""Layers of Llama 4: attention within chunks of a text, and experts that see scaled inputs."""

import dataclasses

import jax
import jax.numpy as jnp

from paxlite.config.templates import Template
from paxlite.layers.attention.attention import DotProductAttention
from paxlite.layers.attention.softmax_attention import Segments
from paxlite.layers.moe.moe import Experts, Routing


@dataclasses.dataclass(frozen=True)
class Chunks:
  """Splits segments into chunks of `length` positions each, which no kernel needs to know of."""

  length: int  # the number of positions of a chunk

  def __call__(
    self, positions_BT: jax.Array, segment_ids_BT: jax.Array | None, start: jax.Array | int
  ) -> jax.Array | None:
    """Returns the ids of the chunks, [B, T], which are 0 where those of segments are 0.

    Args:
      positions_BT: The position of each token in its segment.
      segment_ids_BT: The segment of each token; 0 is padding. None: a row is one segment.
      start: As for DotProductAttention; an array where there are keys from a cache.
    """
    T = positions_BT.shape[1]
    if isinstance(start, int) and self.length >= T:
      return segment_ids_BT  # all tokens of a segment are in its first chunk
    chunks_BT = 1 + positions_BT // self.length
    if segment_ids_BT is None:
      return jnp.broadcast_to(chunks_BT, (max(len(positions_BT), jnp.size(start)), T))
    most = -(-T // self.length)  # chunks of a segment
    return jnp.where(segment_ids_BT == 0, 0, (segment_ids_BT - 1) * most + chunks_BT)


class ChunkedAttention(DotProductAttention):
  """A DotProductAttention whose segments are those that Chunks returns."""

  chunk_length: int = 8192  # the number of positions of a chunk

  def segments(
    self, segment_ids_BT: jax.Array | None, keys: int, start: jax.Array | int
  ) -> Segments | None:
    """Keys of a cache are in the order of their positions, and of one segment."""
    if segment_ids_BT is None or isinstance(start, int):
      return super().segments(segment_ids_BT, keys, start)
    chunks_S = 1 + jnp.arange(keys) // self.chunk_length
    return segment_ids_BT, jnp.broadcast_to(chunks_S, (len(segment_ids_BT), keys))


@dataclasses.dataclass(frozen=True)
class InputScaledDispatch:
  """A dispatch that multiplies what an expert sees by its weight, and not what it returns.

  Each choice of a token is a row of its own for the other dispatch.
  """

  dispatch_tpl: Template  # the other dispatch

  def __call__(
    self, x_JMD: jax.Array, routing: Routing, experts: Experts
  ) -> tuple[jax.Array, jax.Array]:
    """Returns Σ expert(weight · x) [J, M, D], and which choices had a slot [J, M, X]."""
    J, M, D = x_JMD.shape
    X = routing.experts_JMX.shape[-1]
    weights_JMX = routing.weights_JMX.astype(x_JMD.dtype)
    rows_JPD = (x_JMD[:, :, None] * weights_JMX[..., None]).reshape(J, M * X, D)
    of_rows = lambda x: jnp.repeat(x, X, axis=1)
    is_token_JP = of_rows(routing.is_token_JM)
    choices = Routing(
      routing.experts_JMX.reshape(J, M * X, 1), is_token_JP[..., None].astype(jnp.float32),
      of_rows(routing.probabilities_JME), is_token_JP,
    )  # fmt: skip
    y_JPD, kept_JP1 = self.dispatch_tpl()(rows_JPD, choices, experts)
    return y_JPD.reshape(J, M, X, D).sum(2), kept_JP1.reshape(J, M, X)
