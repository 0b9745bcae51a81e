"""Attention of rows that are split over a mesh axis, by an exchange of tokens for heads.

Every function here runs in a shard_map and sees the part of one device. Each device gets whole rows
of a share of the heads. See https://arxiv.org/abs/2309.14509.
"""

from collections.abc import Callable

import jax

from paxlite.context_parallelism.ring_attention import Ring
from paxlite.layers.attention.partial_attention import QKV

# Causal attention of whole rows: q, k, v, segment ids, and the logits of a virtual key.
WholeRowsKernel = Callable[..., jax.Array]


def attend(
  qkv: QKV, segment_ids_BT: jax.Array | None, logit_N: jax.Array | None, kernel: WholeRowsKernel,
  ring: Ring,
) -> jax.Array:  # fmt: skip
  """Returns the context of this device's queries, [B, T, N, H].

  Args:
    qkv: This device's queries [B, T, N, H], and keys and values [B, T, K, H], of all heads; the
      size of the ring divides N and K.
    segment_ids_BT: Its segments; None where there are none.
    logit_N: The logits of a virtual key whose value is 0; None where there is none.
    kernel: Computes causal attention.
    ring: The devices that share a row.
  """

  def exchanged(x: jax.Array, split: int, joined: int) -> jax.Array:
    return jax.lax.all_to_all(x, ring.axis, split, joined, tiled=True)

  q, k, v = (exchanged(x, 2, 1) for x in qkv)
  ids = None
  if segment_ids_BT is not None:
    ids = jax.lax.all_gather(segment_ids_BT, ring.axis, axis=1, tiled=True)
  if logit_N is not None:
    heads = logit_N.shape[0] // ring.size
    first = jax.lax.axis_index(ring.axis) * heads
    logit_N = jax.lax.dynamic_slice_in_dim(logit_N, first, heads)
  return exchanged(kernel(q, k, v, ids, logit_N), 1, 2)
