"""Sums over the segments of packed sequences, whose tokens follow one another."""

import jax
import jax.numpy as jnp


def running_sums(values_NBT: jax.Array, segments_BT: jax.Array) -> jax.Array:
  """Returns sums over the tokens of the same segment up to each token, [N, B, T]."""
  before_BT = jnp.pad(segments_BT[:, :-1], ((0, 0), (1, 0)))
  starts = jnp.broadcast_to(segments_BT != before_BT, values_NBT.shape)

  def add(
    left: tuple[jax.Array, jax.Array], right: tuple[jax.Array, jax.Array]
  ) -> tuple[jax.Array, jax.Array]:
    (a, a_starts), (b, b_starts) = left, right
    return jnp.where(b_starts, b, a + b), a_starts | b_starts

  return jax.lax.associative_scan(add, (values_NBT, starts), axis=2)[0]


def is_last(segments_BT: jax.Array) -> jax.Array:
  """Returns whether each token [B, T] is the last of a segment that is no padding."""
  after_BT = jnp.pad(segments_BT[:, 1:], ((0, 0), (0, 1)))
  return (segments_BT > 0) & (segments_BT != after_BT)


def sums_at_ends(values_BT: jax.Array, segments_BT: jax.Array) -> jax.Array:
  """Returns the sum over each segment at its last token, and 0 at others, [B, T]."""
  (sums_BT,) = running_sums(values_BT[None], segments_BT)
  return jnp.where(is_last(segments_BT), sums_BT, 0)


def totals(values_BT: jax.Array, segments_BT: jax.Array) -> jax.Array:
  """Returns the sum over its segment at each token, [B, T]."""
  flipped = lambda x_BT: jnp.flip(x_BT, 1)
  (before_BT,) = running_sums(values_BT[None], segments_BT)
  (after_BT,) = running_sums(flipped(values_BT)[None], flipped(segments_BT))
  return before_BT + flipped(after_BT) - values_BT
