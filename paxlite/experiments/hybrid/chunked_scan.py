"""Linear attention by chunks: matrix products within a chunk, and a scan over chunks.

A head has a state S [K, V]. Token t decays it, writes to it and reads from it:

    S_t = exp(g_t) · S_{t-1} + k_t ⊗ u_t        o_t = S_tᵀ · q_t

The decay is one factor for a head, or one for each of its K channels, the rows of S. Without a
delta rule, u_t is the value v_t. With one, u_t = β_t · (v_t − exp(g_t) · S_{t-1}ᵀ · k_t): a key's
old value is replaced by the new one (https://arxiv.org/abs/2412.06464, section 3; with channels,
https://arxiv.org/abs/2510.26692, section 3). Within a chunk, the u of all tokens solve a triangular
system, of which section 3.2 of the first paper has the derivation.

The texts of a packed row do not see each other: a token sees the state only if it belongs to the
text that wrote it.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from paxlite.experiments.hybrid.decayed_products import decayed_products, diagonal_blocks

_CHUNK = 64  # tokens
_BLOCK = 8  # rows of a triangle that is inverted by products alone


class ScanChunks(NamedTuple):
  """Inputs of a scan over M chunks of C tokens; arrays have the dimensions [M, B, N, …]."""

  read: jax.Array  # queries that read the state, [C, K]
  scores: jax.Array  # of each token's query and the keys up to it, [C, C]
  values: jax.Array  # what is written without a state, [C, V]
  # the keys whose old values are taken off, [C, K]; None without a delta rule
  erase: jax.Array | None
  write: jax.Array  # keys that write the state after the chunk, [C, K]
  keep: jax.Array  # the factors of the state before the chunk, [1 or K, 1]


def linear_attention(
  q_BTNK: jax.Array,
  k_BTNK: jax.Array,
  v_BTNV: jax.Array,
  log_decay_BTN: jax.Array,
  beta_BTN: jax.Array | None = None,
  segment_ids_BT: jax.Array | None = None,
  state_BNKV: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Returns what each token reads, [B, T, N, V], and the float32 state after the last token.

  Args:
    q_BTNK: Queries, already scaled.
    k_BTNK: Keys. A token without effect on the state has the key 0, beta 0 and decay 0.
    v_BTNV: Values.
    log_decay_BTN: Logarithms of the factors of the state, ≤ 0; [B, T, N, K] for those of channels.
    beta_BTN: How much of a key's old value is replaced; None: values are added.
    segment_ids_BT: Segments of a row, each of which is one run of tokens.
    state_BNKV: The state before the first token; None: 0.
  """
  B, T, N, K = q_BTNK.shape
  shape = B, N, K, v_BTNV.shape[-1]
  state = jnp.zeros(shape, jnp.float32) if state_BNKV is None else state_BNKV
  if T == 1:
    beta_BN = None if beta_BTN is None else beta_BTN[:, 0]
    o_BNV, state = _step(
      q_BTNK[:, 0], k_BTNK[:, 0], v_BTNV[:, 0], log_decay_BTN[:, 0], beta_BN, state
    )
    return o_BNV[:, None].astype(v_BTNV.dtype), state
  chunks = chunks_of(q_BTNK, k_BTNK, v_BTNV, log_decay_BTN, beta_BTN, segment_ids_BT)
  state, o_MBNCV = jax.lax.scan(advance, state, chunks)
  return joined(o_MBNCV, v_BTNV), state


def joined(o_MBNCV: jax.Array, v_BTNV: jax.Array) -> jax.Array:
  """Returns what the tokens of all chunks read, with the shape and the dtype of the values."""
  B, T, N, V = v_BTNV.shape
  o_BTNV = jnp.moveaxis(o_MBNCV, (0, 3), (1, 2)).reshape(B, -1, N, V)
  return o_BTNV[:, :T].astype(v_BTNV.dtype)


def _step(
  q_BNK: jax.Array,
  k_BNK: jax.Array,
  v_BNV: jax.Array,
  log_decay_BN: jax.Array,
  beta_BN: jax.Array | None,
  state_BNKV: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """One token of each row, in float32."""
  q_BNK, k_BNK, u_BNV = (x.astype(jnp.float32) for x in (q_BNK, k_BNK, v_BNV))
  factors = jnp.exp(log_decay_BN.astype(jnp.float32))
  state_BNKV *= factors.reshape(*factors.shape, *[1] * (4 - factors.ndim))
  if beta_BN is not None:
    old_BNV = jnp.einsum('BNKV,BNK->BNV', state_BNKV, k_BNK)
    u_BNV = (u_BNV - old_BNV) * beta_BN[..., None]
  state_BNKV += k_BNK[..., None] * u_BNV[..., None, :]
  return jnp.einsum('BNKV,BNK->BNV', state_BNKV, q_BNK), state_BNKV


def chunks_of(
  q_BTNK: jax.Array,
  k_BTNK: jax.Array,
  v_BTNV: jax.Array,
  log_decay_BTN: jax.Array,
  beta_BTN: jax.Array | None,
  segment_ids_BT: jax.Array | None,
  previous_B: jax.Array | None = None,
) -> ScanChunks:
  """Computes what does not depend on the state, for all chunks at a time.

  The arguments are those of linear_attention, and `previous_B`: the segment before the first
  token, [B]; None: that of the first token.
  """
  B, T = q_BTNK.shape[:2]
  size = min(_CHUNK, max(_BLOCK, 1 << (T - 1).bit_length()))
  beyond = -T % size

  def cut(x: jax.Array) -> jax.Array:
    """[B, T, N, …] to [M, B, N, C, …]."""
    x = jnp.pad(x, [(0, 0), (0, beyond), *[(0, 0)] * (x.ndim - 2)])
    x = x.reshape(B, -1, size, *x.shape[2:])
    return jnp.moveaxis(x, (1, 3), (0, 2))

  q, k, v = cut(q_BTNK), cut(k_BTNK), cut(v_BTNV)
  dtype = v.dtype
  order = jnp.arange(size)
  visible = order[:, None] >= order  # [C, C]
  # whether a token belongs to the text before its chunk, and to that at its end
  before = after = same = jnp.bool_(True)
  if segment_ids_BT is not None:
    ids_BT = jnp.pad(segment_ids_BT, [(0, 0), (0, beyond)], mode='edge')
    ids_MBC = jnp.moveaxis(ids_BT.reshape(B, -1, size), 1, 0)
    last_MB = ids_MBC[..., -1]
    first_1B = ids_MBC[:1, :, 0] if previous_B is None else previous_B[None]
    previous_MB = jnp.concatenate([first_1B, last_MB[:-1]])
    visible = visible & (ids_MBC[..., :, None] == ids_MBC[..., None, :])[:, :, None]
    before = (ids_MBC == previous_MB[..., None])[:, :, None]
    after = (ids_MBC == last_MB[..., None])[:, :, None]
    same = (last_MB == previous_MB)[..., None]
  # sums of each text, so that not even the gradient of another one's rounding is seen
  decays, has_channels = cut(log_decay_BTN.astype(jnp.float32)), log_decay_BTN.ndim == 4
  if not has_channels:
    decays = decays[..., None]
  total, rest = _sums(decays, visible)  # [M, B, N, C, 1 or K]
  # exp of what is masked could overflow, and its gradient would be NaN
  masked = lambda mask, x: jnp.exp(jnp.where(mask, x, -jnp.inf))
  to_start = masked(before[..., None], total + rest)
  to_end = masked(after[..., None], (total[..., -1:, :] - total) + (rest[..., -1:, :] - rest))
  keep = masked(same[..., None], (total + rest)[..., -1, :])[..., None]

  product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
  rows = [q] if beta_BTN is None else [q, k]
  if has_channels:
    products = [*decayed_products(jnp.stack(rows), k, total, rest, visible, _BLOCK)]
  else:
    between = lambda x: x - x.mT  # [C, 1] to [C, C]
    decay = masked(visible, between(total) + between(rest))
    products = [product('...ck,...sk->...cs', row, k) * decay for row in rows]
  values, erase = v.astype(jnp.float32), None
  if beta_BTN is not None:
    beta = cut(beta_BTN.astype(jnp.float32))[..., None]
    inverse = _inverse(jnp.tril(products[1] * beta, -1))
    values = _exact(inverse, values * beta)
    erase = _exact(inverse, k * (beta * to_start)).astype(dtype)
  return ScanChunks(
    read=(q * to_start).astype(dtype), scores=products[0].astype(dtype), values=values, erase=erase,
    write=(k * to_end).astype(dtype), keep=keep,
  )  # fmt: skip


def _sums(x: jax.Array, visible: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns two float32 parts of the sums of x, […, C, 1 or K], over the tokens that each one sees.

  Differences of rounded sums would have few right digits. The first part has sums of multiples of
  2⁻¹¹ up to 2¹³, which are exact, and the second part has sums of the small rest.
  """
  x = jnp.maximum(x, -100.0)  # e⁻¹⁰⁰ is as good as 0
  coarse = jax.lax.stop_gradient(jnp.round(x * 2**11) / 2**11)
  # a product, because XLA for CPUs compiles a cumulative sum in many fusions for minutes
  ones = jnp.broadcast_to(visible, (*x.shape[:2], 1, *visible.shape[-2:])).astype(jnp.float32)
  sums = lambda x: _exact(ones, x)
  return sums(coarse), sums(x - coarse)


def advance(state_BNKV: jax.Array, chunk: ScanChunks) -> tuple[jax.Array, jax.Array]:
  """Returns the state after a chunk, and what its tokens read."""
  product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
  dtype = chunk.read.dtype
  state, values = state_BNKV.astype(dtype), chunk.values
  if chunk.erase is not None:
    values = values - product('BNCK,BNKV->BNCV', chunk.erase, state)
  written = values.astype(dtype)
  read = product('BNCK,BNKV->BNCV', chunk.read, state)
  read += product('BNCS,BNSV->BNCV', chunk.scores, written)
  state_BNKV = state_BNKV * chunk.keep
  state_BNKV += product('BNCK,BNCV->BNKV', chunk.write, written)
  return state_BNKV, read.astype(dtype)


# TPUs and GPUs would round the factors of products of float32
_exact = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


@jax.custom_vjp
def _inverse(lower: jax.Array) -> jax.Array:
  """Returns (1 + lower)⁻¹ for strictly lower triangles [C, C], in float32.

  Blocks of the diagonal are inverted by a short product, and joined by the inverse of a matrix of
  2 × 2 blocks. The series of a whole triangle would lose all digits where keys are alike.
  """
  size = lower.shape[-1]
  blocks = diagonal_blocks(lower, _BLOCK)
  inverse = jnp.eye(_BLOCK) - blocks
  power = blocks
  for _ in range(_BLOCK.bit_length() - 2):
    power = _exact(power, power)
    inverse += _exact(inverse, power)
  while inverse.shape[-1] < size:
    n = inverse.shape[-1]
    first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
    below = -_exact(_exact(second, diagonal_blocks(lower, 2 * n, n)), first)
    above = jnp.zeros_like(below)
    inverse = jnp.block([[first, above], [below, second]])
  return inverse[..., 0, :, :]


def _inverse_forward(lower: jax.Array) -> tuple[jax.Array, jax.Array]:
  inverse = _inverse(lower)
  return inverse, inverse


def _inverse_backward(inverse: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
  transposed = inverse.mT
  return (-jnp.tril(_exact(_exact(transposed, gradient), transposed), -1),)


_inverse.defvjp(_inverse_forward, _inverse_backward)
