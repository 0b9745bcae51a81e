"""Attention within a window, of rows that are split over a mesh axis.

Every function here runs in a shard_map and sees the part of one device. A device gets the keys that
the window of its first query reaches from the devices before it. Nothing else is sent.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from paxlite.context_parallelism.ring_attention import Ring
from paxlite.layers.attention.partial_attention import QKV
from paxlite.layers.remat import attention_saveable

WholeRowsKernel = Callable[..., jax.Array]  # causal attention of whole rows: q, k, v, segment ids


def reach(window: int, length: int, size: int) -> int:
  """Returns how many keys of other devices a device needs, in whole multiples of a block.

  Args:
    window: The keys that a query sees, with its own.
    length: The tokens of one device.
    size: The number of devices.
  """
  multiple = next(n for n in (128, 2, 1) if length % n == 0)
  return min(-(-(window - 1) // multiple) * multiple, (size - 1) * length)


def piece(window: int, length: int, most: int) -> int:
  """Returns the number of queries per block, so that few keys are read twice.

  Args:
    window: The keys that a query sees, with its own.
    length: The tokens of one device.
    most: The most queries, unless the window has half as many keys.
  """
  most = max(most, 2 * window)
  return length // next(n for n in range(-(-length // most), length + 1) if length % n == 0)


def attend(
  qkv: QKV, segment_ids_BT: jax.Array | None, kernel: WholeRowsKernel, window: int, ring: Ring,
  piece: int | None = None,
) -> jax.Array:  # fmt: skip
  """Returns the context of this device's queries, [B, T, N, H].

  The kernel gets rows in which the needed keys come before the device's own tokens. The first
  devices need fewer keys. Their rows begin with these keys too, and are filled at the end, where no
  query sees the filling. So the kernel needs only its own mask. Queries of needed keys are 0.

  Args:
    qkv: This device's queries [B, T, N, H], keys and values [B, T, K, H].
    segment_ids_BT: Its segments; None where there are none.
    kernel: Computes causal attention within the window.
    window: The keys that a query sees, with its own.
    ring: The devices that share a row.
    piece: The number of queries to compute at a time, which divides T; None means all.
  """
  q_BTNH, k_BTKH, v_BTKH = qkv
  T = q_BTNH.shape[1]
  before, p = reach(window, T, ring.size), piece or T

  def with_needed(own: jax.Array) -> jax.Array:
    parts = [own]
    for distance in range(1, -(-before // T) + 1):
      size = min(before - (distance - 1) * T, T)
      pairs = [(i, i + distance) for i in range(ring.size - distance)]
      parts.insert(0, jax.lax.ppermute(own[:, T - size :], ring.axis, pairs))
    return jnp.concatenate(parts, axis=1)

  def attend_piece(
    first: ArrayLike, q: jax.Array, keys: tuple[jax.Array, jax.Array, jax.Array | None]
  ) -> jax.Array:
    """Returns the context of the queries from `first` on, with the keys before and at them."""
    valid = jnp.minimum(before, jax.lax.axis_index(ring.axis) * T + first)

    def moved(row: jax.Array) -> jax.Array:
      twice = jnp.concatenate([row, row[:, :before]], axis=1)
      return jax.lax.dynamic_slice_in_dim(twice, before - valid, before + p, axis=1)

    q = moved(jnp.pad(q, [(0, 0), (before, 0), (0, 0), (0, 0)]))
    return jax.lax.dynamic_slice_in_dim(kernel(q, *jax.tree.map(moved, keys)), valid, p, axis=1)

  keys = jax.tree.map(with_needed, (k_BTKH, v_BTKH, segment_ids_BT))
  if p == T:
    return attend_piece(0, q_BTNH, keys)

  def turn(_: None, first: jax.Array) -> tuple[None, jax.Array]:
    of = lambda x, size: jax.lax.dynamic_slice_in_dim(x, first, size, axis=1)
    keys_of = jax.tree.map(lambda x: of(x, before + p), keys)
    return None, compute(first, of(q_BTNH, p), keys_of)

  # Otherwise the masks of all pieces would be kept for the backward pass.
  compute = jax.checkpoint(attend_piece, policy=attention_saveable, prevent_cse=False)
  _, contexts = jax.lax.scan(turn, None, jnp.arange(0, T, p))
  return jnp.concatenate(list(contexts), axis=1)
