"""Products of groups of rows with a matrix each, as batched products of blocks of rows, for GPUs.

XLA's own lowering of jax.lax.ragged_dot on GPUs multiplies every row by the matrices of all groups
(jax 0.12, CUDA). Here each block of rows has one group, and a copy of its matrix. The copies cost
memory traffic that kernels of grouped products do not have. Few exist at once: a loop takes a chunk
of blocks at a time, and skips chunks after the last group.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from paxlite.core.trees import ArrayOrShape

ROWS = 256  # a block of rows; a group's number of rows is a multiple of it
CALLS = ()
_FEW = 512  # choices of which a product with all matrices is cheaper than copies of them
_COPIES = 2**29  # bytes of the copies of a chunk, within 4 to 64 blocks


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
  chunk = lambda w_CDF, x_CRD: (jnp.einsum('CRD,CDF->CRF', x_CRD, w_CDF), None)
  zeros_PF = jnp.zeros((len(x_PD), w_EDF.shape[2]), x_PD.dtype)
  return _chunks(chunk, (zeros_PF, None), w_EDF, sizes_E, x_PD)[0]


def _backward(res: tuple[jax.Array, ...], dy_PF: jax.Array) -> tuple[jax.Array, jax.Array, None]:
  x_PD, w_EDF, sizes_E = res
  chunk = lambda w_CDF, x_CRD, dy_CRF: (
    jnp.einsum('CRF,CDF->CRD', dy_CRF, w_CDF),
    jnp.einsum('CRD,CRF->CDF', x_CRD, dy_CRF, preferred_element_type=jnp.float32),
  )
  zeros = jnp.zeros_like(x_PD), jnp.zeros(w_EDF.shape, jnp.float32)
  dx_PD, dw_EDF = _chunks(chunk, zeros, w_EDF, sizes_E, x_PD, dy_PF)
  return dx_PD, dw_EDF.astype(w_EDF.dtype), None


product.defvjp(lambda *arguments: (product(*arguments), arguments), _backward)


def _chunks(
  chunk: Callable[..., Any], zeros: Any, w_EDF: jax.Array, sizes_E: jax.Array, *rows: jax.Array
) -> Any:
  """Returns `zeros` with the rows that `chunk` makes of C blocks each, and its sums by group.

  The last chunk begins earlier if C does not divide the number of blocks; no block is summed twice.
  """
  E, B = len(w_EDF), len(rows[0]) // ROWS
  num_chunks = -(-B // max(4, min(64, _COPIES * E // w_EDF.nbytes)))
  C = -(-B // num_chunks)
  row_B = jnp.arange(B) * ROWS
  group_B = jnp.searchsorted(jnp.cumsum(sizes_E), row_B, side='right', method='compare_all')

  def computed(first: jax.Array, y_PN: jax.Array, sum_EDF: jax.Array | None) -> Any:
    block_C = jnp.minimum(first, B - C) + jnp.arange(C)
    group_C, at = group_B[block_C], block_C[0] * ROWS
    blocks = (jax.lax.dynamic_slice_in_dim(x, at, C * ROWS).reshape(C, ROWS, -1) for x in rows)
    y_CRN, each_CDF = chunk(w_EDF.at[group_C].get(mode='clip'), *blocks)
    if sum_EDF is not None:
      sum_EDF = sum_EDF.at[jnp.where(block_C < first, E, group_C)].add(each_CDF, mode='drop')
    return jax.lax.dynamic_update_slice_in_dim(y_PN, y_CRN.reshape(C * ROWS, -1), at, 0), sum_EDF

  def body(carry: Any, first: jax.Array) -> tuple[Any, None]:
    return jax.lax.cond(group_B[first] < E, computed, lambda _, *same: same, first, *carry), None

  return jax.lax.scan(body, zeros, jnp.arange(0, B, C))[0]
