"""Attention in plain XLA that holds one block of scores at a time.

The backward pass computes the scores again from the log-sums, so that no array [T, S] ever exists.
See https://arxiv.org/abs/2112.05682.
"""

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from paxlite.layers.attention.attention_case import Case, LocalKernel
from paxlite.layers.attention.partial_attention import (
  QKV,
  Partial,
  sink_logit_gradient,
  sink_logits,
  with_sink_logit,
)
from paxlite.layers.attention.softmax_attention import Segments, Softmax, masked_scores

_Sums = tuple[jax.Array, jax.Array, jax.Array]  # contexts, largest scores, sums of exponentials
# the arguments of _attend that are arrays, and its result
_Residuals = tuple[QKV, jax.Array | None, Segments | None, Partial]
_BLOCK = 512  # keys
_PIECES = 8  # the queries of a row are cut into so many pieces, each with the keys that it sees


@dataclasses.dataclass(frozen=True)
class Blockwise:
  """A PartialKernel in plain XLA."""

  softmax: Softmax  # the scale, the cap and the window; without an attention sink
  block_size: int = 0  # the most keys of a block; 0 means 512

  def forward(self, qkv: QKV, segments: Segments | None, causal: bool, start: int = 0) -> Partial:
    """See PartialKernel. `start` is the index of the first query among the keys."""
    q_BTNH, k_BSKH, v_BSKH = qkv
    B, T, N, _ = q_BTNH.shape
    K = k_BSKH.shape[2]

    def step(sums: _Sums, i: jax.Array) -> tuple[_Sums, None]:
      context_BTNH, largest_BNT, total_BNT = sums
      k, v, mask = self._block(i, k_BSKH, v_BSKH, segments, T, start if causal else None)
      scores_BNTS = masked_scores(q_BTNH, k, mask, None, self.softmax)
      new_BNT = jnp.maximum(largest_BNT, scores_BNTS.max(-1))
      weights_BNTS = jnp.exp(scores_BNTS - new_BNT[..., None])
      decay_BNT = jnp.exp(largest_BNT - new_BNT)
      total_BNT = total_BNT * decay_BNT + weights_BNTS.sum(-1)
      context_BTNH *= decay_BNT.swapaxes(1, 2)[..., None]
      context_BTNH += _product('BKGTS,BSKH->BTKGH', weights_BNTS.astype(v.dtype), v, K)
      return (context_BTNH, new_BNT, total_BNT), None

    zeros_BNT = jnp.zeros((B, N, T), jnp.float32)
    context = jnp.zeros((B, T, N, v_BSKH.shape[-1]), jnp.float32)
    blocks = jnp.arange(k_BSKH.shape[1] // self._size(k_BSKH))
    # Otherwise JAX would compute all masks before a loop over layers, and keep them.
    blocks, k_BSKH = jax.lax.optimization_barrier((blocks, k_BSKH))
    sums, _ = jax.lax.scan(step, (context, zeros_BNT - 1e30, zeros_BNT), blocks)
    context, largest, total = sums
    return Partial(context / total.swapaxes(1, 2)[..., None], largest + jnp.log(total))

  def backward(
    self, qkv: QKV, segments: Segments | None, causal: bool, whole: Partial, gradient: jax.Array,
    start: int = 0,
  ) -> QKV:  # fmt: skip
    """See PartialKernel. `start` is the index of the first query among the keys."""
    q_BTNH, k_BSKH, v_BSKH = qkv
    T, K, cap = q_BTNH.shape[1], k_BSKH.shape[2], self.softmax.logit_cap
    product_BTNH = whole.context.astype(jnp.float32) * gradient.astype(jnp.float32)
    mean_BNT1 = product_BTNH.sum(-1).swapaxes(1, 2)[..., None]

    def step(dq: jax.Array, i: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
      k, v, mask = self._block(i, k_BSKH, v_BSKH, segments, T, start if causal else None)
      scores_BNTS = masked_scores(q_BTNH, k, mask, None, self.softmax)
      weights_BNTS = jnp.exp(scores_BNTS - whole.lse[..., None])
      dv = _product('BKGTS,BTKGH->BSKH', weights_BNTS.astype(v.dtype), gradient, K)
      of_weights_BNTS = _product('BTKGH,BSKH->BKGTS', gradient, v, K)
      of_scores_BNTS = weights_BNTS * (of_weights_BNTS - mean_BNT1)
      if cap > 0:
        of_scores_BNTS *= jnp.where(mask, 1 - (scores_BNTS / cap) ** 2, 0)
      of_scores_BNTS = (of_scores_BNTS * self.softmax.query_scale).astype(q_BTNH.dtype)
      dq += _product('BKGTS,BSKH->BTKGH', of_scores_BNTS, k, K)
      return dq, (_product('BKGTS,BTKGH->BSKH', of_scores_BNTS, q_BTNH, K), dv)

    blocks = jnp.arange(k_BSKH.shape[1] // self._size(k_BSKH))
    dq, of_blocks = jax.lax.scan(step, jnp.zeros(q_BTNH.shape, jnp.float32), blocks)
    dk, dv = (x.swapaxes(0, 1).reshape(x.shape[1], -1, *x.shape[3:]) for x in of_blocks)
    return dq, dk, dv

  def _size(self, k_BSKH: jax.Array) -> int:
    """Returns the number of keys of a block: the largest divisor of all keys."""
    S, most = k_BSKH.shape[1], self.block_size or _BLOCK
    return max(n for n in range(1, min(most, S) + 1) if S % n == 0)

  def _block(
    self,
    i: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    segments: Segments | None,
    T: int,
    start: int | None,
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns keys and values of block i, and the mask [T, s] or [B, 1, T, s]."""
    size = self._size(k_BSKH)
    part = lambda x: jax.lax.dynamic_slice_in_dim(x, i * size, size, axis=1)
    mask = jnp.ones((T, size), bool)
    if start is not None:
      distance = start + jnp.arange(T)[:, None] - (i * size + jnp.arange(size))
      mask = distance >= 0
      if self.softmax.window > 0:
        mask &= distance < self.softmax.window
    if segments is not None:
      of_queries_BT, of_keys_BS = segments
      mask = (mask & (of_queries_BT[:, :, None] == part(of_keys_BS)[:, None]))[:, None]
    return part(k_BSKH), part(v_BSKH), mask


def _product(equation: str, one: jax.Array, other: jax.Array, kv_heads: int) -> jax.Array:
  """Einsum in float32; its letters K and G are one dimension N of the arrays."""
  first, second, result = equation.replace('->', ',').split(',')

  def grouped(x: jax.Array, letters: str) -> jax.Array:
    if 'G' not in letters:
      return x
    at = letters.index('K')
    return x.reshape(*x.shape[:at], kv_heads, -1, *x.shape[at + 1 :])

  y = jnp.einsum(
    equation, grouped(one, first), grouped(other, second), preferred_element_type=jnp.float32
  )
  if 'G' not in result:
    return y
  at = result.index('K')
  return y.reshape(*y.shape[:at], -1, *y.shape[at + 2 :])


class BlockwiseKernel(LocalKernel):
  """Computes rows that are split over context where no fused kernel does."""

  name = 'plain XLA by blocks of keys'
  is_fused = False

  def reasons(self, case: Case) -> dict[str, bool]:
    return {'is for sequences split over context': not case.over_context}

  def attend_locally(self, case: Case) -> jax.Array:
    logit_N = sink_logits(case.softmax, case.q.shape[2])
    kernel = Blockwise(dataclasses.replace(case.softmax, sink_logit=None), case.block_size)
    return _attend(case.arrays, logit_N, case.visible.segments, kernel)

  def parts(self, case: Case) -> Blockwise:
    return Blockwise(case.softmax, case.block_size)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _attend(
  qkv: QKV, logit_N: jax.Array | None, segments: Segments | None, kernel: Blockwise
) -> jax.Array:
  return _forward(qkv, logit_N, segments, kernel)[0]


def _forward(
  qkv: QKV, logit_N: jax.Array | None, segments: Segments | None, kernel: Blockwise
) -> tuple[jax.Array, _Residuals]:
  q_BTNH, k_BSKH, v_BSKH = qkv
  parts = [
    kernel.forward((q_BTNH[:, rows], k_BSKH[:, keys], v_BSKH[:, keys]), ids, True, start)
    for rows, keys, ids, start in _pieces(q_BTNH.shape[1], segments, kernel.softmax.window)
  ]
  context = jnp.concatenate([part.context for part in parts], 1)
  lse = jnp.concatenate([part.lse for part in parts], 2)
  whole = with_sink_logit(Partial(context, lse), logit_N)
  whole = Partial(whole.context.astype(v_BSKH.dtype), whole.lse)
  return whole.context, (qkv, logit_N, segments, whole)


def _backward(
  kernel: Blockwise, res: _Residuals, gradient: jax.Array
) -> tuple[tuple[jax.Array, ...], jax.Array | None, None]:
  (q_BTNH, k_BSKH, v_BSKH), logit_N, segments, whole = res
  dqs, dk, dv = [], jnp.zeros(k_BSKH.shape, jnp.float32), jnp.zeros(v_BSKH.shape, jnp.float32)
  for rows, keys, ids, start in _pieces(q_BTNH.shape[1], segments, kernel.softmax.window):
    of_rows = Partial(whole.context[:, rows], whole.lse[:, :, rows])
    qkv, do = (q_BTNH[:, rows], k_BSKH[:, keys], v_BSKH[:, keys]), gradient[:, rows]
    dq, dk_part, dv_part = kernel.backward(qkv, ids, True, of_rows, do, start)
    dqs.append(dq)
    dk, dv = dk.at[:, keys].add(dk_part), dv.at[:, keys].add(dv_part)
  found = zip((jnp.concatenate(dqs, 1), dk, dv), (q_BTNH, k_BSKH, v_BSKH), strict=True)
  d_logit = sink_logit_gradient(whole, gradient, logit_N)
  return tuple(x.astype(like.dtype) for x, like in found), d_logit, None


_attend.defvjp(_forward, _backward)


def _pieces(
  T: int, segments: Segments | None, window: int
) -> Iterator[tuple[slice, slice, Segments | None, int]]:
  """Cuts a row into pieces of queries with the keys that they see.

  Yields the queries, their keys, the segments of both, and the index of the first query among the
  keys.
  """
  size = next(T // n for n in (_PIECES, 4, 2, 1) if T % n == 0)
  for begin in range(0, T, size):
    first = max(begin - window + 1, 0) // size * size if window > 0 else 0
    rows, keys = slice(begin, begin + size), slice(first, begin + size)
    ids = None if segments is None else (segments[0][:, rows], segments[1][:, keys])
    yield rows, keys, ids, begin - first
