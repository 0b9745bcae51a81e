"""Attention in plain XLA, and the parts of it that other kernels use too.

A kernel is a function (q_BTNH, k_BSKH, v_BSKH, mask, bias_JNTS, softmax) → context [B, T, N, H].
The mask is [T, S] or [B, 1, T, S]. The bias may be None; otherwise each of J groups of B / J
neighboring rows has its own.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from paxlite.layers.cross_entropy import cap_logits

Segments = tuple[jax.Array, jax.Array]  # ids of the queries [B, T] and of the keys [B, S]


@dataclasses.dataclass(frozen=True)
class AttentionMask:
  """The keys that a query sees: its own and earlier ones, in a window, of its own segment."""

  start: jax.Array | int = 0  # index of the first query among the keys, an integer or [B]
  # a query sees this many of the latest keys, including its own; ≤ 0 means all keys
  window: int = 0
  # segments of the queries and of the keys; None means that there are none
  segments: Segments | None = None

  @property
  def is_from_first(self) -> bool:
    """Whether it is known that the first query belongs to the first key."""
    return isinstance(self.start, int) and self.start == 0

  def mask(self, T: int, S: int) -> jax.Array:
    """Returns the boolean mask, [T, S] or [B, 1, T, S], which only some kernels need."""
    distance = jnp.arange(T)[:, None] - jnp.arange(S)
    if jnp.ndim(self.start):
      distance = jnp.asarray(self.start)[:, None, None, None] + distance
    else:
      distance = self.start + distance
    mask = distance >= 0
    if self.window > 0:
      mask &= distance < self.window
    if self.segments is None:
      return mask
    of_queries_BT, of_keys_BS = self.segments
    return mask & (of_queries_BT[:, :, None] == of_keys_BS[:, None, :])[:, None]


@dataclasses.dataclass(frozen=True)
class Softmax:
  """softmax(cap(q·k) + bias + mask), with the softmax in float32."""

  query_scale: float  # factor of the queries
  logit_cap: float = 0.0  # the logits are capped by cap · tanh(logits / cap); ≤ 0 means no cap
  # A query sees this many of the latest keys, including its own; ≤ 0 means all keys. The mask
  # already contains the window.
  window: int = 0
  # the logit of a virtual key whose value is 0, one or [N]; None means no virtual key
  sink_logit: float | jax.Array | None = None
  # applies dropout to the attention weights; None means no dropout
  dropout: Callable[[jax.Array], jax.Array] | None = None


def attend(
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKH: jax.Array,
  mask: jax.Array,
  bias_JNTS: jax.Array | None,
  softmax: Softmax,
) -> jax.Array:
  """Computes attention in plain XLA."""
  scores_BNTS = masked_scores(q_BTNH, k_BSKH, mask, bias_JNTS, softmax)
  return weighted_values(attention_weights(scores_BNTS, softmax), v_BSKH, softmax)


def masked_scores(
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  mask: jax.Array,
  bias_JNTS: jax.Array | None,
  softmax: Softmax,
) -> jax.Array:
  """Returns the arguments of the softmax, [B, N, T, S] float32."""
  B, T, N, H = q_BTNH.shape
  S, K = k_BSKH.shape[1:3]
  q_BTNH = q_BTNH * softmax.query_scale
  if K == N:
    scores_BNTS = jnp.einsum('BTNH,BSNH->BNTS', q_BTNH, k_BSKH)
  else:
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H)
    scores_BNTS = jnp.einsum('BTKGH,BSKH->BKGTS', q_BTKGH, k_BSKH).reshape(B, N, T, S)
  return masked(scores_BNTS, mask, bias_JNTS, softmax)


def masked(
  scores_BNTS: jax.Array, mask: jax.Array, bias_JNTS: jax.Array | None, softmax: Softmax
) -> jax.Array:
  """Returns the arguments of the softmax, given the products of queries and keys."""
  B, N, T, S = scores_BNTS.shape
  scores_BNTS = cap_logits(scores_BNTS.astype(jnp.float32), softmax.logit_cap)
  if bias_JNTS is not None:
    J = bias_JNTS.shape[0]
    scores_JbNTS = scores_BNTS.reshape(J, B // J, N, T, S) + bias_JNTS[:, None]
    scores_BNTS = scores_JbNTS.reshape(B, N, T, S)
  return jnp.where(mask, scores_BNTS, -1e30)


def attention_weights(scores_BNTS: jax.Array, softmax: Softmax) -> jax.Array:
  """Returns the softmax of its arguments, with the virtual key of an attention sink."""
  if softmax.sink_logit is None:
    return jax.nn.softmax(scores_BNTS, axis=-1)
  weights_BNTS, total_BNT = exponentials(scores_BNTS, softmax.sink_logit)
  return weights_BNTS / total_BNT[..., None]


def exponentials(
  scores_BNTS: jax.Array, sink_logit: float | jax.Array | None
) -> tuple[jax.Array, jax.Array]:
  """Returns exp(scores − each query's largest score), and their sums over keys [B, N, T].

  The virtual key of the attention sink is included in the largest score and in the sum.
  """
  largest_BNT = scores_BNTS.max(-1)
  if sink_logit is not None:
    sink_logit = jnp.asarray(sink_logit, jnp.float32)[..., None]  # for each head, or for all
    largest_BNT = jnp.maximum(largest_BNT, sink_logit)
  largest_BNT = jax.lax.stop_gradient(largest_BNT)
  weights_BNTS = jnp.exp(scores_BNTS - largest_BNT[..., None])
  total_BNT = weights_BNTS.sum(-1)
  if sink_logit is not None:
    total_BNT += jnp.exp(sink_logit - largest_BNT)
  return weights_BNTS, total_BNT


def weighted_values(weights_BNTS: jax.Array, v_BSKH: jax.Array, softmax: Softmax) -> jax.Array:
  """Applies dropout to the weights; returns the weighted sum of the values, [B, T, N, H]."""
  B, N, T, S = weights_BNTS.shape
  K, H = v_BSKH.shape[2:]
  weights_BNTS = weights_BNTS.astype(v_BSKH.dtype)
  if softmax.dropout is not None:
    weights_BNTS = softmax.dropout(weights_BNTS)
  if K == N:
    return jnp.einsum('BNTS,BSNH->BTNH', weights_BNTS, v_BSKH)
  weights_BKGTS = weights_BNTS.reshape(B, K, N // K, T, S)
  return jnp.einsum('BKGTS,BSKH->BTKGH', weights_BKGTS, v_BSKH).reshape(B, T, N, H)
