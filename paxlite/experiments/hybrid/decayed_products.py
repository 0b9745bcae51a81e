"""Products of queries and keys that decay between them, by a factor for each channel.

The scalar product of row i and key j is Σ_c rᵢ_c · kⱼ_c · exp(Gᵢ_c − Gⱼ_c), where G is the sum of
the decays. If the factor were split into exp(Gᵢ) and exp(−Gⱼ), the second one would overflow. So
blocks are split in halves: rows of the second half and keys of the first one meet at the boundary m
between the halves, and exp(Gᵢ − Gₘ) · exp(Gₘ − Gⱼ) has no exponent above 0. Products of the
smallest blocks have a factor for each pair. The split is that of https://arxiv.org/abs/2312.06635,
section 4.3, at more levels.
"""

import functools

import jax
import jax.numpy as jnp


def decayed_products(
  rows: jax.Array, k: jax.Array, total: jax.Array, rest: jax.Array, visible: jax.Array, block: int
) -> jax.Array:
  """Returns the products of rows and keys with the decays between them, [R, …, C, C] in float32.

  Args:
    rows: What is multiplied by keys, [R, …, C, K].
    k: Keys, [..., C, K].
    total: Sums of the decays up to each token, over the tokens that it sees, [..., C, K].
    rest: The part of the sums that `total` lacks.
    visible: Whether a token sees a key, [C, C] or broadcast against [..., C, C]. A token sees keys
      of its own run of tokens alone, up to its own.
    block: The size of the smallest blocks, a power of two as C is.
  """
  size = k.shape[-2]
  see = jnp.broadcast_to(visible, (*(1,) * (k.ndim - visible.ndim), *visible.shape))
  pairs = jax.checkpoint(_pairs)  # its factors are as large as keys times `block`
  cut = functools.partial(_cut, size=block)
  whole = pairs(cut(rows), cut(k), cut(total), cut(rest), diagonal_blocks(see, block))
  while whole.shape[-1] < size:
    whole = _joined(whole, rows, k, total, rest, see)
  return whole[..., 0, :, :]


def _cut(x: jax.Array, size: int) -> jax.Array:
  """[..., C, K] to [..., C / size, size, K]."""
  return x.reshape(*x.shape[:-2], -1, size, x.shape[-1])


def diagonal_blocks(x: jax.Array, size: int, row: int = 0) -> jax.Array:
  """Returns the blocks of `size` on the diagonal, [C/size, size − row, size − row].

  With a `row`, of each block only the rows from there on, and the columns that are left of them.
  """
  width = size - row
  starts = range(0, x.shape[-1], size)
  return jnp.stack([x[..., s + row : s + size, s : s + width] for s in starts], -3)


def _pairs(
  rows: jax.Array, k: jax.Array, total: jax.Array, rest: jax.Array, see: jax.Array
) -> jax.Array:
  """The products of all pairs of a block, [R, …, size, size]."""
  between = lambda x: x[..., :, None, :] - x[..., None, :, :]
  factors = jnp.exp(jnp.where(see[..., None], between(total) + between(rest), -jnp.inf))
  factors *= k.astype(jnp.float32)[..., None, :, :]
  return (rows.astype(jnp.float32)[..., :, None, :] * factors).sum(-1)


def _joined(
  whole: jax.Array, rows: jax.Array, k: jax.Array, total: jax.Array, rest: jax.Array, see: jax.Array
) -> jax.Array:
  """Returns the products of blocks of twice the size, from those of blocks [R, …, blocks, n, n]."""
  n = whole.shape[-1]
  cut = functools.partial(_cut, size=n)
  first, second = lambda x: cut(x)[..., 0::2, :, :], lambda x: cut(x)[..., 1::2, :, :]
  latest = lambda x: first(x)[..., -1:, :]  # of the first half
  both = diagonal_blocks(see, 2 * n)
  # whether a row of the second half sees the last key of the first one, and whether that sees a key
  of_rows, of_keys = both[..., n:, n - 1, None], both[..., n - 1, :n, None]
  factor = lambda mask, x: jnp.exp(jnp.where(mask, x, -jnp.inf))
  from_middle = (second(total) - latest(total)) + (second(rest) - latest(rest))
  to_middle = (latest(total) - first(total)) + (latest(rest) - first(rest))
  below = jnp.einsum(
    '...ck,...sk->...cs', (second(rows) * factor(of_rows, from_middle)).astype(rows.dtype),
    (first(k) * factor(of_keys, to_middle)).astype(k.dtype), preferred_element_type=jnp.float32,
  )  # fmt: skip
  above = jnp.zeros_like(below)
  return jnp.block([[whole[..., 0::2, :, :], above], [below, whole[..., 1::2, :, :]]])
