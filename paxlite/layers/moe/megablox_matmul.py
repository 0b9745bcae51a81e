"""Products of groups of rows with a matrix each, by megablox, the TPU kernels that JAX ships.

A kernel goes through a grid of blocks, and reads a block again unless the step before had it. At
128 rows a block, a matrix that is read again for each block of rows costs several times as much as
the product. So a matrix stays in VMEM over the rows of its group where it fits.
"""

import functools

import jax
import jax.numpy as jnp

from paxlite.core.trees import ArrayOrShape

ROWS = 128  # a group's number of rows is a multiple of it, so that few blocks have two groups
CALLS = 'pallas_call', 'tpu_custom_call'
_LANES = 128
_LEAST_CONTRACTED = 512  # in a block: after so many products each sum is read and written
_VMEM = 12 * 2**20  # bytes of blocks and sums of a kernel; the rest of 16 MiB is for temporaries


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


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
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
  from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm  # needs Pallas for TPUs

  (P, D), (E, _, F) = x_PD.shape, w_EDF.shape
  sizes, tile = sizes_E.astype(jnp.int32), block(P, D, F, E, w_EDF.dtype.itemsize)
  return gmm(x_PD, w_EDF, sizes, x_PD.dtype, tile, interpret=interpret)


def _forward(
  x_PD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array, interpret: bool
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
  # jax.checkpoint copies what it keeps if the forward pass uses it too (jax 0.12), but not a view
  return product(x_PD, w_EDF, sizes_E, interpret), (x_PD[None], w_EDF, sizes_E)


def _backward(
  interpret: bool, res: tuple[jax.Array, ...], dy_PF: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
  from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm

  (x_PD,), w_EDF, sizes_E = res
  (P, D), (E, _, F), itemsize = x_PD.shape, w_EDF.shape, w_EDF.dtype.itemsize
  sizes, tile = sizes_E.astype(jnp.int32), block(P, F, D, E, itemsize)
  dx_PD = gmm(dy_PF, w_EDF, sizes, x_PD.dtype, tile, transpose_rhs=True, interpret=interpret)
  tile = block(P, D, F, E, itemsize, is_gradient=True)
  dw_EDF = tgmm(x_PD.T, dy_PF, sizes, w_EDF.dtype, tile, interpret=interpret)
  return dx_PD, dw_EDF, None


product.defvjp(_forward, _backward)


def block(
  P: int, D: int, F: int, E: int, itemsize: int, is_gradient: bool = False
) -> tuple[int, int, int]:
  """Returns rows, D and F of the block with which a kernel reads least from main memory.

  A product contracts D. The gradient of the matrices [D, F] contracts the rows of a group.

  Args:
    P: The number of rows.
    D: The second dimension of the rows.
    F: The second dimension of the results of a product.
    E: The number of groups. A block with rows of two groups is computed twice, so groups have four
      blocks or more.
    itemsize: Bytes of a number.
    is_gradient: Whether the matrices are the result.
  """
  rows = next(r for r in (512, 256, ROWS) if r == ROWS or (P % r == 0 and 4 * E * r <= P))
  found: dict[tuple[int, int, int], tuple[bool, int]] = {}
  for d in _parts(D):
    for f in _parts(F):
      if is_gradient:
        sums, read = d * f, P * (D * -(-F // f) + F * -(-D // d))
      elif d >= min(D, _LEAST_CONTRACTED):
        sums, read = rows * f, P * D * -(-F // f) + D * F * (E if d == D else P // rows)
      else:
        continue
      if 2 * itemsize * (rows * d + d * f + rows * f) + 4 * sums <= _VMEM:
        found[rows, d, f] = bool(D % d or F % f), read
  return min(found, key=found.__getitem__)


def _parts(size: int) -> list[int]:
  """Returns the sizes of equal parts, in multiples of lanes, large ones first."""
  lanes = size // _LANES
  return sorted({-(-lanes // n) * _LANES for n in range(1, lanes + 1)}, reverse=True)
