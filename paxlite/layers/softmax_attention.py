"""Attention in plain XLA, and the parts of it that other kernels share.

A kernel is a function (q_BTNH, k_BSKH, v_BSKH, mask, bias_NTS, softmax, segments) → context
[B, T, N, H]. Its mask is [T, S] or [B, 1, T, S]; its bias may be None. The segments, which the mask
contains, are for kernels that compute the mask themselves.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from paxlite.layers.embeddings import cap_logits

Segments = tuple[jax.Array, jax.Array]  # ids of the queries [B, T] and of the keys [B, S]


@dataclasses.dataclass(frozen=True)
class Softmax:
  """softmax(cap(q·k) + bias + mask), with the softmax in float32.

  Attributes:
    query_scale: Multiplies the queries.
    logit_cap: cap · tanh(logits / cap) before the softmax; off where ≤ 0.
    window: A query sees this many of the latest keys, its own included; all where ≤ 0. The mask
      says so too.
    extra_logit: The logit of a virtual key whose value is 0; None for models without.
    dropout: Drops out attention weights; None where nothing is dropped.
  """

  query_scale: float
  logit_cap: float = 0.0
  window: int = 0
  extra_logit: float | None = None
  dropout: Callable[[jax.Array], jax.Array] | None = None


def attend(
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKH: jax.Array,
  mask: jax.Array,
  bias_NTS: jax.Array | None,
  softmax: Softmax,
  segments: Segments | None = None,
) -> jax.Array:
  """The kernel in plain XLA."""
  scores_BNTS = masked_scores(q_BTNH, k_BSKH, mask, bias_NTS, softmax)
  if softmax.extra_logit is None:
    weights_BNTS = jax.nn.softmax(scores_BNTS, axis=-1)
  else:
    weights_BNTS, total_BNT = exponentials(scores_BNTS, softmax.extra_logit)
    weights_BNTS /= total_BNT[..., None]
  return weighted_values(weights_BNTS, v_BSKH, softmax)


def masked_scores(
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  mask: jax.Array,
  bias_NTS: jax.Array | None,
  softmax: Softmax,
) -> jax.Array:
  """The arguments of the softmax, [B, N, T, S] float32."""
  B, T, N, H = q_BTNH.shape
  S, K = k_BSKH.shape[1:3]
  q_BTNH = q_BTNH * softmax.query_scale
  if K == N:
    scores_BNTS = jnp.einsum('BTNH,BSNH->BNTS', q_BTNH, k_BSKH)
  else:
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H)
    scores_BNTS = jnp.einsum('BTKGH,BSKH->BKGTS', q_BTKGH, k_BSKH).reshape(B, N, T, S)
  scores_BNTS = cap_logits(scores_BNTS.astype(jnp.float32), softmax.logit_cap)
  if bias_NTS is not None:
    scores_BNTS += bias_NTS
  return jnp.where(mask, scores_BNTS, -1e30)


def exponentials(scores_BNTS: jax.Array, extra_logit: float | None) -> tuple[jax.Array, jax.Array]:
  """exp(scores − the largest of a query), and their sums [B, N, T] with the extra logit's."""
  largest_BNT = scores_BNTS.max(-1)
  if extra_logit is not None:
    largest_BNT = jnp.maximum(largest_BNT, extra_logit)
  largest_BNT = jax.lax.stop_gradient(largest_BNT)
  weights_BNTS = jnp.exp(scores_BNTS - largest_BNT[..., None])
  total_BNT = weights_BNTS.sum(-1)
  if extra_logit is not None:
    total_BNT += jnp.exp(extra_logit - largest_BNT)
  return weights_BNTS, total_BNT


def weighted_values(weights_BNTS: jax.Array, v_BSKH: jax.Array, softmax: Softmax) -> jax.Array:
  """The sum of the values by attention weights, [B, T, N, H]; dropout comes before."""
  B, N, T, S = weights_BNTS.shape
  K, H = v_BSKH.shape[2:]
  weights_BNTS = weights_BNTS.astype(v_BSKH.dtype)
  if softmax.dropout is not None:
    weights_BNTS = softmax.dropout(weights_BNTS)
  if K == N:
    return jnp.einsum('BNTS,BSNH->BTNH', weights_BNTS, v_BSKH)
  weights_BKGTS = weights_BNTS.reshape(B, K, N // K, T, S)
  return jnp.einsum('BKGTS,BSKH->BTKGH', weights_BKGTS, v_BSKH).reshape(B, T, N, H)
