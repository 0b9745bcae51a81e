"""A kernel for capped scores: the cap bounds them, so that the softmax needs no largest score."""

import jax
import jax.numpy as jnp

from paxlite.experiments.demo import TinyGPT
from paxlite.layers.attention import attention_kernels
from paxlite.layers.attention.attention_case import Case, Kernel


class Capped(Kernel):
  """softmax(cap · tanh(q·k / cap))·v on CPUs."""

  name = 'the kernel for caps'
  platform = 'cpu'
  traced = 0  # how often it was asked for

  def refusal(self, case: Case) -> str | None:
    softmax = case.softmax
    if softmax.logit_cap <= 0:
      return 'computes capped scores alone'
    if case.bias is not None or softmax.dropout is not None or softmax.sink_logit is not None:
      return 'knows no bias, no dropout and no attention sink'
    return None

  def attend(self, case: Case) -> jax.Array:
    Capped.traced += 1
    q_BTNH, k_BSKH, v_BSKH = case.arrays
    (B, T, N, H), (S, K) = q_BTNH.shape, k_BSKH.shape[1:3]
    q_BTKGH = (q_BTNH * case.softmax.query_scale).reshape(B, T, K, N // K, H)
    scores = jnp.einsum('BTKGH,BSKH->BKGTS', q_BTKGH, k_BSKH).astype(jnp.float32)
    cap = case.softmax.logit_cap
    weights = jnp.exp(cap * (jnp.tanh(scores / cap) - 1))
    weights = jnp.where(case.visible.mask(T, S)[..., None, :, :], weights, 0)
    context = jnp.einsum('BKGTS,BSKH->BTKGH', weights.astype(v_BSKH.dtype), v_BSKH)
    total = weights.sum(-1).transpose(0, 3, 1, 2)[..., None]
    return (context / total).astype(v_BSKH.dtype).reshape(B, T, N, -1)


attention_kernels.register(Capped())


class CappedGPT(TinyGPT):
  """TinyGPT with a cap that many scores come near to."""

  ATTEN_LOGIT_CAP = 1.0
  INIT_STD = 0.3  # so that attention matters from the first step on
  PERCORE_BATCH_SIZE = 1
  MAX_STEPS = 3
