"""Attention of one query a row, as each new token of a text has it, with a cache of keys."""

import dataclasses
from typing import cast

import jax
import jax.numpy as jnp

from paxlite.layers.attention.attention_case import Case, Kernel
from paxlite.layers.attention.softmax_attention import attention_weights, masked


class OneQueryKernel(Kernel):
  """Reads keys and values once, in the order of the cache, [B, K, S, H].

  With [B, S, K, H], as other kernels have it, XLA would transpose both for each token. With a
  small window, the keys before it are not read.
  """

  name = 'the kernel for one query'
  is_fused = False

  def refusal(self, case: Case) -> str | None:
    if case.q.shape[1] != 1:
      return 'takes one query a row'
    return 'does not support attention dropout' if case.softmax.dropout is not None else None

  def attend(self, case: Case) -> jax.Array:
    case = _within_window(case)
    q_B1NH, k_BSKH, v_BSKH = case.arrays
    (B, S, K), N = k_BSKH.shape[:3], q_B1NH.shape[2]
    k_BKSH, v_BKSH = k_BSKH.swapaxes(1, 2), v_BSKH.swapaxes(1, 2)
    q_BKGH = (q_B1NH * case.softmax.query_scale).reshape(B, K, N // K, -1)
    scores_BKGS = jnp.einsum('BKGH,BKSH->BKGS', q_BKGH, k_BKSH, preferred_element_type=jnp.float32)
    scores_BN1S = scores_BKGS.reshape(B, N, 1, S)
    bias_JN1S = cast('jax.Array | None', case.bias)
    scores_BN1S = masked(scores_BN1S, case.visible.mask(1, S), bias_JN1S, case.softmax)
    weights_BN1S = attention_weights(scores_BN1S, case.softmax).astype(v_BKSH.dtype)
    context_BKGH = jnp.einsum('BKGS,BKSH->BKGH', weights_BN1S.reshape(B, K, N // K, S), v_BKSH)
    return context_BKGH.reshape(B, 1, N, -1)


def _within_window(case: Case) -> Case:
  """Returns the case of the keys in the window of each row's query.

  XLA copies them, so that they are read twice and written once. Where that is no less than to read
  all keys, the case stays as it is.
  """
  window, (_, k_BSKH, v_BSKH) = case.softmax.window, case.arrays
  (B, S), start = k_BSKH.shape[:2], case.visible.start
  if not 0 < 3 * window < S or case.visible.segments is not None or case.bias is not None:
    return case
  start_B = jnp.broadcast_to(start, (B,))
  first_B = jnp.clip(start_B - window + 1, 0, S - window)
  of_row = lambda x, first: jax.lax.dynamic_slice_in_dim(x, first, window, 0)
  visible = dataclasses.replace(case.visible, start=start_B - first_B)
  k, v = (jax.vmap(of_row)(x, first_B) for x in (k_BSKH, v_BSKH))
  return dataclasses.replace(case, k=k, v=v, visible=visible)
