"""A kernel of attention that computes tiles of queries and keys, one after the other."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from paxlite.layers.attention.partial_attention import (
  QKV,
  Partial,
  PartialKernel,
  merged_by_lse,
  part_of,
  updated,
)
from paxlite.layers.attention.softmax_attention import Segments

TILE = 8192  # the most tokens of a tile: a mask takes 128 MiB, or 256 with twice as many keys


@dataclasses.dataclass(frozen=True)
class Tiled:
  """A PartialKernel that calls another one, whose mask of segments is an array [B, T, S], on tiles.

  Without segments there is no such array, and the other kernel is called once. Tiles of keys that
  no query sees are left out.
  """

  kernel: PartialKernel  # computes a tile
  size: int = TILE  # the most tokens of a tile, of the queries or of the keys, whichever are fewer

  def forward(self, qkv: QKV, segments: Segments | None, causal: bool) -> Partial:
    """See PartialKernel."""
    q, k, v = qkv
    count = self._count(min(q.shape[1], k.shape[1]))
    if segments is None or count == 1:
      return self.kernel.forward(qkv, segments, causal)
    B, t, N = q.shape[0], q.shape[1] // count, q.shape[2]
    q, k, v, of_q, of_k = (_tiles(x, count) for x in (q, k, v, *segments))

    def turn(sums: Partial, at: tuple[jax.Array, jax.Array], causal: bool) -> tuple[Partial, None]:
      i, j = at
      ids = part_of(of_q, i), part_of(of_k, j)
      seen = self.kernel.forward((part_of(q, i), part_of(k, j), part_of(v, j)), ids, causal)
      seen = Partial(seen.context.astype(jnp.float32), seen.lse)
      return updated(sums, i, functools.partial(merged_by_lse, seen)), None

    sums = Partial(
      jnp.zeros((count, B, t, N, v.shape[-1]), jnp.float32),
      jnp.full((count, B, N, t), -1e30, jnp.float32),
    )
    for pairs, is_causal in _pairs(count, causal):
      sums, _ = jax.lax.scan(functools.partial(turn, causal=is_causal), sums, pairs)
    lse = jnp.moveaxis(sums.lse, 0, 2).reshape(B, N, count * t)
    return Partial(_whole(sums.context), lse)

  def backward(
    self, qkv: QKV, segments: Segments | None, causal: bool, whole: Partial, gradient: jax.Array
  ) -> QKV:
    """See PartialKernel."""
    q, k, v = qkv
    count = self._count(min(q.shape[1], k.shape[1]))
    if segments is None or count == 1:
      return self.kernel.backward(qkv, segments, causal, whole, gradient)
    B, T, N = q.shape[:3]
    lse = jnp.moveaxis(whole.lse.reshape(B, N, count, T // count), 2, 0)
    arrays = (q, k, v, *segments, whole.context, gradient)
    q, k, v, of_q, of_k, context, gradient = (_tiles(x, count) for x in arrays)

    def turn(found: QKV, at: tuple[jax.Array, jax.Array], causal: bool) -> tuple[QKV, None]:
      i, j = at
      of_whole = Partial(part_of(context, i), part_of(lse, i))
      dq, dk, dv = self.kernel.backward(
        (part_of(q, i), part_of(k, j), part_of(v, j)), (part_of(of_q, i), part_of(of_k, j)),
        causal, of_whole, part_of(gradient, i),
      )  # fmt: skip
      add = lambda sums, number, x: updated(sums, number, lambda old: old + x)
      return (add(found[0], i, dq), add(found[1], j, dk), add(found[2], j, dv)), None

    zeros = lambda x: jnp.zeros(x.shape, jnp.float32)
    found: QKV = zeros(q), zeros(k), zeros(v)
    for pairs, is_causal in _pairs(count, causal):
      found, _ = jax.lax.scan(functools.partial(turn, causal=is_causal), found, pairs)
    dq, dk, dv = (_whole(x) for x in found)
    return dq, dk, dv

  def _count(self, T: int) -> int:
    """Returns the number of tiles of T tokens."""
    return next(n for n in range(-(-T // self.size), T + 1) if T % n == 0)


def _pairs(count: int, causal: bool) -> list[tuple[tuple[np.ndarray, np.ndarray], bool]]:
  """Returns the numbers of tiles of queries and of keys, and whether the mask is causal."""
  i, j = np.indices((count, count)).reshape(2, -1)
  if not causal:
    return [((i, j), False)]
  return [((i[i == j], j[i == j]), True), ((i[i > j], j[i > j]), False)]


def _tiles(x: jax.Array, count: int) -> jax.Array:
  """Cuts an array [B, T, …] into tiles [count, B, T / count, …]."""
  return x.reshape(x.shape[0], count, -1, *x.shape[2:]).swapaxes(0, 1)


def _whole(x: jax.Array) -> jax.Array:
  """Puts tiles [count, B, T / count, …] together to an array [B, T, …]."""
  x = x.swapaxes(0, 1)
  return x.reshape(x.shape[0], -1, *x.shape[3:])
