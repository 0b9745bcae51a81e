"""Linear attention as layers call it: of whole rows, of split rows, and of parts of rows."""

import jax
import jax.numpy as jnp

from paxlite.experiments.hybrid.chunked_scan import linear_attention
from paxlite.experiments.hybrid.context_states import is_split, linear_attention_over_context
from paxlite.experiments.hybrid.row_state import RowState
from paxlite.parallel.partitioning import shard


def attend(
  rows: RowState,
  q_BTNK: jax.Array,
  k_BTNK: jax.Array,
  v_BTNV: jax.Array,
  log_decay_BTN: jax.Array,
  beta_BTN: jax.Array | None,
  segment_ids_BT: jax.Array | None,
) -> jax.Array:
  """Returns what each token reads, [B, T, N, V]; `rows` keeps the states after those that count.

  What other tokens read has no meaning, but in a step of generation: there, they are drafts.

  The arrays are those of chunked_scan.linear_attention.
  """
  arrays = q_BTNK, k_BTNK, v_BTNV, log_decay_BTN, beta_BTN
  if is_split() and not rows.is_kept:
    return linear_attention_over_context(*arrays, segment_ids_BT)

  def of_heads(x: jax.Array) -> jax.Array:
    # a scan over chunks of tokens, so that tokens are not split over devices
    return shard(x, 'batch', None, 'act_heads', *[None] * (x.ndim - 3))

  q_BTNK, k_BTNK, v_BTNV, log_decay_BTN = map(of_heads, arrays[:4])
  beta_BTN = None if beta_BTN is None else of_heads(beta_BTN)
  shape = k_BTNK.shape[2:] + v_BTNV.shape[3:]
  state = rows.before('heads', shape, jnp.dtype(jnp.float32))

  def counted(x: jax.Array) -> jax.Array:
    counts_BT = rows.counts_BT
    if counts_BT is None:
      return x
    return jnp.where(counts_BT.reshape(*counts_BT.shape, *[1] * (x.ndim - 2)), x, 0)

  written = (counted(v_BTNV), None) if beta_BTN is None else (v_BTNV, counted(beta_BTN))
  read, after = linear_attention(
    q_BTNK, k_BTNK, written[0], counted(log_decay_BTN), written[1], segment_ids_BT, state
  )
  rows.keep('heads', after)
  if rows.has_drafts:
    read, _ = linear_attention(
      q_BTNK, k_BTNK, v_BTNV, log_decay_BTN, beta_BTN, segment_ids_BT, state
    )
  return read
