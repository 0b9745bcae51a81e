"""Products of groups of rows with a matrix each, as batched products of blocks of rows, for GPUs.

XLA's own lowering of jax.lax.ragged_dot on GPUs multiplies every row by the matrices of all groups
(jax 0.12, CUDA). Here each block of rows has one group, and a copy of its matrix. The copies cost
memory traffic that kernels of grouped products do not have.
"""

import jax
import jax.numpy as jnp

from paxlite.core.trees import ArrayOrShape

ROWS = 256  # a block of rows; a group's number of rows is a multiple of it
CALLS = ()
_FEW = 512  # choices of which a product with all matrices is cheaper than copies of them


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
  w_BDF = w_EDF.at[_groups(x_PD, sizes_E)].get(mode='clip')
  return jnp.einsum('BRD,BDF->BRF', _blocks(x_PD), w_BDF).reshape(len(x_PD), -1)


def _backward(res: tuple[jax.Array, ...], dy_PF: jax.Array) -> tuple[jax.Array, jax.Array, None]:
  x_PD, w_EDF, sizes_E = res
  group_B, dy_BRF = _groups(x_PD, sizes_E), _blocks(dy_PF)
  dx_BRD = jnp.einsum('BRF,BDF->BRD', dy_BRF, w_EDF.at[group_B].get(mode='clip'))
  dw_BDF = jnp.einsum('BRD,BRF->BDF', _blocks(x_PD), dy_BRF, preferred_element_type=jnp.float32)
  # a scatter drops the blocks after the last group
  dw_EDF = jax.ops.segment_sum(dw_BDF, group_B, len(w_EDF), indices_are_sorted=True)
  return dx_BRD.reshape(x_PD.shape), dw_EDF.astype(w_EDF.dtype), None


product.defvjp(lambda *arguments: (product(*arguments), arguments), _backward)


def _blocks(x_PD: jax.Array) -> jax.Array:
  return x_PD.reshape(-1, ROWS, x_PD.shape[1])


def _groups(x_PD: jax.Array, sizes_E: jax.Array) -> jax.Array:
  """Returns the group of each block; their number for blocks after the last group."""
  starts_B = jnp.arange(0, len(x_PD), ROWS)
  return jnp.searchsorted(jnp.cumsum(sizes_E), starts_B, side='right', method='compare_all')
