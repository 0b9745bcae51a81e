"""Attention within chunks of a text, as in Llama 4."""

import dataclasses

import jax
import jax.numpy as jnp

from paxlite.layers.attention.attention import DotProductAttention
from paxlite.layers.attention.softmax_attention import Segments


@dataclasses.dataclass(frozen=True)
class Chunks:
  """Splits segments into chunks of `length` positions each, which no kernel needs to know of.

  Attributes:
    length: The number of positions of a chunk.
  """

  length: int

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
  """A DotProductAttention whose segments are those that Chunks returns.

  Attributes:
    chunk_length: The number of positions of a chunk.
  """

  chunk_length: int = 8192

  def segments(
    self, segment_ids_BT: jax.Array | None, keys: int, start: jax.Array | int
  ) -> Segments | None:
    """Keys of a cache are in the order of their positions, and of one segment."""
    if segment_ids_BT is None or isinstance(start, int):
      return super().segments(segment_ids_BT, keys, start)
    chunks_S = 1 + jnp.arange(keys) // self.chunk_length
    return segment_ids_BT, jnp.broadcast_to(chunks_S, (len(segment_ids_BT), keys))
