"""Products of groups of rows with a matrix each, by megablox, the TPU kernels that JAX ships."""

import jax
import jax.numpy as jnp

from paxlite.core.trees import ArrayOrShape

ROWS = 128  # a group's number of rows is a multiple of it, so that few blocks have two groups
CALLS = 'pallas_call', 'tpu_custom_call'
_LANES = 128
_TILE = (512, 1024, 1024)  # rows, contracted dimension and columns of a block, at most


def refusal(w_EDF: ArrayOrShape, platform: str, num_choices: int) -> str | None:
  """See GroupedKernel."""
  del num_choices
  if platform != 'tpu':
    return 'runs on TPUs'
  if w_EDF.dtype not in (jnp.bfloat16, jnp.float32):
    return 'multiplies bfloat16 and float32'
  if w_EDF.shape[1] % _LANES or w_EDF.shape[2] % _LANES:
    return f'takes matrices with sizes divisible by {_LANES}'
  return None


def product(
  x_PD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array, interpret: bool = False
) -> jax.Array:
  """Returns y[p] = x[p]·w[e], [P, F], where e is the group of row p; sums are in float32.

  Args:
    x_PD: Rows, sorted by group; P is a multiple of ROWS.
    w_EDF: A matrix for each group.
    sizes_E: The number of rows of each group. What rows after their sum give is undefined.
    interpret: Whether the kernels run as plain JAX, on any platform.
  """
  from jax.experimental.pallas.ops.tpu.megablox import gmm  # needs Pallas for TPUs

  P, D = x_PD.shape
  rows = next(r for r in (_TILE[0], 256, ROWS) if P % r == 0)
  tile = rows, min(_TILE[1], D), min(_TILE[2], w_EDF.shape[2])
  sizes = sizes_E.astype(jnp.int32)
  return gmm(x_PD, w_EDF, sizes, x_PD.dtype, tile, interpret=interpret)
