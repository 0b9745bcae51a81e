"""Products of groups of rows with a matrix each, by Triton kernels for NVIDIA GPUs.

XLA's own lowering of jax.lax.ragged_dot on GPUs multiplies every row by the matrices of all groups.
These kernels multiply it by that of its group alone. A group's rows start at a multiple of ROWS, so
that a block of rows belongs to one group, and no kernel needs to mask rows.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from paxlite.core.trees import ArrayOrShape

ROWS = 128  # a block of rows; a group's number of rows is a multiple of it
CALLS = 'pallas_call', '__gpu$xla.gpu.triton'
_STAGES = 3  # of the pipeline of steps
_COLUMNS = (256, 128, 64)  # the first that divides a matrix is the width of a block


class Blocks(NamedTuple):
  """The sizes of what a kernel holds in shared memory."""

  columns: int  # the largest width of a block
  depth: int  # what a step of the sum takes of the contracted dimension

  def shared_bytes(self, itemsize: int) -> int:
    """The shared memory of a kernel: the operands of two steps, and one operand once more."""
    step = self.depth * itemsize
    return (_STAGES - 1) * (ROWS + self.columns) * step + self.columns * step


def blocks_of(itemsize: int) -> Blocks:
  """Returns the blocks for numbers of 2 or 4 bytes.

  With the blocks of 2 bytes, kernels of 4 bytes need 256 KiB of shared memory. An H100 has 227.
  """
  return Blocks(256, 64) if itemsize <= 2 else Blocks(128, 32)


def refusal(w_EDF: ArrayOrShape, platform: str) -> str | None:
  """See GroupedKernel."""
  if platform not in ('gpu', 'cuda'):
    return 'runs on NVIDIA GPUs'
  if w_EDF.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
    return 'multiplies numbers of 16 and 32 bits'
  if w_EDF.shape[1] % _COLUMNS[-1] or w_EDF.shape[2] % _COLUMNS[-1]:
    return f'takes matrices with sizes divisible by {_COLUMNS[-1]}'
  return None


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def product(
  x_PD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array, interpret: bool = False
) -> jax.Array:
  """Returns y[p] = x[p]·w[e], [P, F], where e is the group of row p.

  Sums are in float32.

  Args:
    x_PD: Rows, sorted by group; P is a multiple of ROWS.
    w_EDF: A matrix for each group.
    sizes_E: The number of rows of each group, multiples of ROWS. Rows after their sum give 0.
    interpret: Whether the kernels run as plain JAX, on any platform.
  """
  return _rows_times_matrices(x_PD, w_EDF, sizes_E, transposed=False, interpret=interpret)


def _backward(
  interpret: bool, res: tuple[jax.Array, ...], dy_PF: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
  x_PD, w_EDF, sizes_E = res
  dx_PD = _rows_times_matrices(dy_PF, w_EDF, sizes_E, transposed=True, interpret=interpret)
  return dx_PD, _columns_times_rows(x_PD, dy_PF, sizes_E, interpret), None


product.defvjp(lambda *arguments: (product(*arguments), arguments[:3]), _backward)


def _rows_times_matrices(
  x_PD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array, transposed: bool, interpret: bool
) -> jax.Array:
  """Returns x[p]·w[e], or x[p]·w[e]ᵀ if `transposed`; D is what is contracted."""
  P, D = x_PD.shape
  E, F = w_EDF.shape[0], w_EDF.shape[1 if transposed else 2]
  sizes = blocks_of(x_PD.dtype.itemsize)
  columns, depth = _width(F, sizes.columns), sizes.depth
  blocks = P // ROWS
  # the group of each block of rows; E for blocks after the last group
  group_B = jnp.searchsorted(
    jnp.cumsum(sizes_E) // ROWS, jnp.arange(blocks), side='right', method='compare_all'
  )

  def kernel(group_ref: jax.Ref, x_ref: jax.Ref, w_ref: jax.Ref, y_ref: jax.Ref) -> None:
    group = group_ref[pl.program_id(0)]
    column = pl.ds(pl.program_id(1) * columns, columns)

    def step(i: jax.Array, sum_PF: jax.Array) -> jax.Array:
      part = pl.ds(i * depth, depth)
      w = w_ref[group, column, part] if transposed else w_ref[group, part, column]
      return sum_PF + plgpu.dot(x_ref[:, part], w, trans_b=transposed)

    steps = jnp.where(group < E, jnp.int32(D // depth), jnp.int32(0))
    sum_PF = jax.lax.fori_loop(jnp.int32(0), steps, step, jnp.zeros((ROWS, columns), jnp.float32))
    y_ref[...] = sum_PF.astype(y_ref.dtype)

  return pl.pallas_call(
    kernel,
    grid=(blocks, F // columns),
    in_specs=[
      pl.BlockSpec((blocks,), lambda i, j: (0,)),
      pl.BlockSpec((ROWS, D), lambda i, j: (i, 0)),
      pl.BlockSpec(w_EDF.shape, lambda i, j: (0, 0, 0)),
    ],
    out_specs=pl.BlockSpec((ROWS, columns), lambda i, j: (i, j)),
    out_shape=jax.ShapeDtypeStruct((P, F), x_PD.dtype),
    compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=_STAGES),
    interpret=interpret,
    name='rows_times_matrices',
  )(group_B.astype(jnp.int32), x_PD, w_EDF)


def _columns_times_rows(
  x_PD: jax.Array, dy_PF: jax.Array, sizes_E: jax.Array, interpret: bool
) -> jax.Array:
  """Returns Σ x[p]ᵀ·dy[p] over the rows of each group, [E, D, F]."""
  D, F, E = x_PD.shape[1], dy_PF.shape[1], sizes_E.shape[0]
  sizes = blocks_of(x_PD.dtype.itemsize)
  rows, columns, depth = _width(D, ROWS), _width(F, sizes.columns), sizes.depth
  stop_E = jnp.cumsum(sizes_E).astype(jnp.int32)
  start_E = stop_E - sizes_E.astype(jnp.int32)

  def kernel(
    start_ref: jax.Ref, stop_ref: jax.Ref, x_ref: jax.Ref, dy_ref: jax.Ref, dw_ref: jax.Ref
  ) -> None:
    group = pl.program_id(0)

    def step(i: jax.Array, sum_DF: jax.Array) -> jax.Array:
      part = pl.ds(i * depth, depth)
      return sum_DF + plgpu.dot(x_ref[part, :], dy_ref[part, :], trans_a=True)

    first = jax.lax.div(start_ref[group], jnp.int32(depth))
    last = jax.lax.div(stop_ref[group], jnp.int32(depth))
    sum_DF = jax.lax.fori_loop(first, last, step, jnp.zeros((rows, columns), jnp.float32))
    dw_ref[...] = sum_DF.astype(dw_ref.dtype)

  P = x_PD.shape[0]
  return pl.pallas_call(
    kernel,
    grid=(E, D // rows, F // columns),
    in_specs=[
      pl.BlockSpec((E,), lambda e, i, j: (0,)),
      pl.BlockSpec((E,), lambda e, i, j: (0,)),
      pl.BlockSpec((P, rows), lambda e, i, j: (0, i)),
      pl.BlockSpec((P, columns), lambda e, i, j: (0, j)),
    ],
    out_specs=pl.BlockSpec((None, rows, columns), lambda e, i, j: (e, i, j)),
    out_shape=jax.ShapeDtypeStruct((E, D, F), x_PD.dtype),
    compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=_STAGES),
    interpret=interpret,
    name='columns_times_rows',
  )(start_E, stop_E, x_PD, dy_PF)


def _width(size: int, largest: int) -> int:
  return next(width for width in _COLUMNS if size % width == 0 and width <= largest)
