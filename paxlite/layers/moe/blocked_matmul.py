"""Products of groups of rows with a matrix each, as batched products of blocks of rows, for GPUs.

XLA's own lowering of jax.lax.ragged_dot on GPUs multiplies every row by the matrices of all groups
(jax 0.12, CUDA). Here each block of rows has one group, and a copy of its matrix. The copies cost
memory traffic that kernels of grouped products do not have. A loop takes a chunk of blocks at a
time, so that few copies exist at once, and skips chunks after the last group.
"""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from paxlite.core.trees import ArrayOrShape

ROWS = 256  # a block of rows; a group's number of rows is a multiple of it
CALLS = ()
_FEW = 512  # choices of which a product with all matrices is cheaper than copies of them
_COPIES = 2**29  # bytes of the copies of a chunk, within 4 to 64 blocks

_Carry = TypeVar('_Carry')


def refusal(w_EDF: ArrayOrShape, platform: str, num_choices: int) -> str | None:
  """See GroupedKernel."""
  del w_EDF
  if platform not in ('gpu', 'cuda', 'rocm'):
    return 'is for GPUs'
  return f'is for more than {_FEW} choices' if num_choices <= _FEW else None


@jax.custom_vjp
def product(x_PD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array) -> jax.Array:
  """Returns y[p] = x[p]·w[e], [P, F], where e is the group of row p.

  Args:
    x_PD: Rows, sorted by group; P is a multiple of ROWS.
    w_EDF: A matrix for each group.
    sizes_E: The number of rows of each group, multiples of ROWS. What rows after their sum give is
      undefined.
  """

  def chunk(y_PF: jax.Array, at: jax.Array, group_C: jax.Array, _: jax.Array) -> jax.Array:
    w_CDF = w_EDF.at[group_C].get(mode='clip')
    return _put(y_PF, at, jnp.einsum('CRD,CDF->CRF', _blocks(x_PD, at, group_C), w_CDF))

  return _loop(chunk, jnp.zeros((len(x_PD), w_EDF.shape[2]), x_PD.dtype), len(x_PD), w_EDF, sizes_E)


def _backward(res: tuple[jax.Array, ...], dy_PF: jax.Array) -> tuple[jax.Array, jax.Array, None]:
  x_PD, w_EDF, sizes_E = res

  def chunk(
    grads: tuple[jax.Array, jax.Array], at: jax.Array, group_C: jax.Array, once_C: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    (dx_PD, dw_EDF), dy_CRF = grads, _blocks(dy_PF, at, group_C)
    dx_CRD = jnp.einsum('CRF,CDF->CRD', dy_CRF, w_EDF.at[group_C].get(mode='clip'))
    x_CRD = _blocks(x_PD, at, group_C)
    dw_CDF = jnp.einsum('CRD,CRF->CDF', x_CRD, dy_CRF, preferred_element_type=jnp.float32)
    dw_EDF = dw_EDF.at[once_C].add(dw_CDF, mode='drop', indices_are_sorted=True)
    return _put(dx_PD, at, dx_CRD), dw_EDF

  zeros = jnp.zeros_like(x_PD), jnp.zeros(w_EDF.shape, jnp.float32)
  dx_PD, dw_EDF = _loop(chunk, zeros, len(x_PD), w_EDF, sizes_E)
  return dx_PD, dw_EDF.astype(w_EDF.dtype), None


product.defvjp(lambda *arguments: (product(*arguments), arguments), _backward)


def _loop(
  chunk: Callable[[_Carry, jax.Array, jax.Array, jax.Array], _Carry],
  carry: _Carry,
  num_rows: int,
  w_EDF: jax.Array,
  sizes_E: jax.Array,
) -> _Carry:
  """Returns what chunks of C blocks make of `carry`, one after the other.

  A chunk gets its first row, and the group of each block, which is E after the last group. The last
  chunk shares blocks with the one before it if C does not divide their number. What is summed takes
  the second array of groups, in which these blocks are E.
  """
  E, B = len(w_EDF), num_rows // ROWS
  C = min(B, max(4, min(64, _COPIES * E // w_EDF.nbytes)))
  starts_B = jnp.arange(B) * ROWS
  group_B = jnp.searchsorted(jnp.cumsum(sizes_E), starts_B, side='right', method='compare_all')

  def body(carry: _Carry, first: jax.Array) -> tuple[_Carry, None]:
    block_C = jnp.minimum(first, B - C) + jnp.arange(C)
    group_C = group_B[block_C]
    once_C = jnp.where(block_C < first, E, group_C)
    full = lambda carry: chunk(carry, block_C[0] * ROWS, group_C, once_C)
    return jax.lax.cond(group_B[first] < E, full, lambda carry: carry, carry), None

  return jax.lax.scan(body, carry, jnp.arange(0, B, C))[0]


def _blocks(x_PD: jax.Array, at: jax.Array, group_C: jax.Array) -> jax.Array:
  rows = jax.lax.dynamic_slice_in_dim(x_PD, at, len(group_C) * ROWS)
  return rows.reshape(len(group_C), ROWS, -1)


def _put(y_PF: jax.Array, at: jax.Array, y_CRF: jax.Array) -> jax.Array:
  return jax.lax.dynamic_update_slice_in_dim(y_PF, y_CRF.reshape(-1, y_PF.shape[1]), at, 0)
