"""Attention in plain XLA, whole or by blocks of queries."""

import functools
from collections.abc import Callable
from typing import cast

import jax
import jax.numpy as jnp

from paxlite.layers.attention import softmax_attention
from paxlite.layers.attention.attention_case import Case, Kernel


class XlaKernel(Kernel):
  """Computes every case."""

  name = 'plain XLA'
  is_fused = False
  function: Callable[..., jax.Array] = staticmethod(softmax_attention.attend)

  def refusal(self, case: Case) -> str | None:
    del case
    return None

  def block_size(self, length: int) -> int:
    """Returns the default number of queries per block."""
    return length

  def attend(self, case: Case) -> jax.Array:
    (q_BTNH, k_BSKH, v_BSKH), T, S = case.arrays, case.q.shape[1], case.k.shape[1]
    bias_JNTS = cast('jax.Array | None', case.bias)
    arrays = q_BTNH, k_BSKH, v_BSKH, case.visible.mask(T, S), bias_JNTS
    kernel: Callable[..., jax.Array] = functools.partial(self.function, softmax=case.softmax)
    size = case.block_size or self.block_size(T)
    is_whole = T == S and case.visible.is_from_first and case.shards('length') == 1
    if not is_whole or T % size or size == T or case.softmax.dropout is not None:
      return kernel(*arrays)
    if case.block_size:
      kernel = jax.checkpoint(kernel)
    return _by_blocks(kernel, size, *arrays)


def _by_blocks(
  kernel: Callable[..., jax.Array],
  block_size: int,
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKH: jax.Array,
  mask: jax.Array,
  bias_JNTS: jax.Array | None,
) -> jax.Array:
  """Applies `kernel` to blocks of queries, each with the keys up to the block's last query.

  With many blocks, half of the scores are never computed. Only the scores of one block exist at a
  time. This holds in the backward pass too, if `kernel` recomputes the scores there.
  """
  contexts = []
  for stop in range(block_size, q_BTNH.shape[1] + block_size, block_size):
    rows = slice(stop - block_size, stop)
    bias = None if bias_JNTS is None else bias_JNTS[..., rows, :stop]
    contexts.append(
      kernel(q_BTNH[:, rows], k_BSKH[:, :stop], v_BSKH[:, :stop], mask[..., rows, :stop], bias)
    )
  return jnp.concatenate(contexts, axis=1)
