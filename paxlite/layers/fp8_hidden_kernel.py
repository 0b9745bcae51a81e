"""Triton kernels between the products of a feed-forward layer in FP8.

cuBLASLt's products in FP8 read both matrices along the dimension that they sum over. The gradient
of the hidden units is therefore read in two layouts, by the products for the gradients of the
activations and of the weights. XLA cannot transpose and sum in one kernel. It writes that gradient
in bfloat16, reads it again to quantize it and for its sums, and then transposes 8 bits. `gradients`
does all of it in one pass over what it reads. The kernel of the forward pass exists because XLA
writes some hidden units in bfloat16 before it quantizes them.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

_ROWS, _COLUMNS = 64, 128  # of a block
# What a block has of an array: its own elements, the same transposed, a row of them, or one.
_WHOLE = pl.BlockSpec((_ROWS, _COLUMNS), lambda i, j: (i, j))
_TRANSPOSED = pl.BlockSpec((_COLUMNS, _ROWS), lambda i, j: (j, i))
_ROW = pl.BlockSpec((None, _COLUMNS), lambda i, j: (i, j))
_ONE = pl.BlockSpec((None, None), lambda i, j: (i, j))
GRADIENT, ACTIVATION = jnp.float8_e5m2, jnp.float8_e4m3fn
_OF_ACTIVATIONS, _OF_GRADIENT = 0, 2  # places in the scales of a product; 1 is that of the weight


class QuantizedGradient(NamedTuple):
  """The gradient of an argument of the activation function, [R, F], in FP8.

  Attributes:
    q_RF: The gradient divided by its scale.
    q_FR: The same, transposed.
    sum_F: The sum of the unscaled gradient over rows, float32.
    largest: The largest absolute value of the unscaled gradient, float32.
  """

  q_RF: jax.Array
  q_FR: jax.Array
  sum_F: jax.Array
  largest: jax.Array


def fits(rows: int, columns: int) -> bool:
  """Returns whether the kernels compute arrays of this shape."""
  in_blocks = rows % _ROWS == 0 and columns % _COLUMNS == 0
  return in_blocks and rows * columns <= 2**31  # Triton's offsets are int32


def hidden_units(
  activate: Callable[..., jax.Array],
  args: tuple[jax.Array, ...],
  mask_R: jax.Array,
  down_scales: jax.Array,
  interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
  """Returns activate(*args) · mask in FP8, [R, F], and its largest absolute value, float32.

  Args:
    activate: An elementwise function.
    args: The arguments of `activate`, [R, F] each.
    mask_R: 0 for rows of padding, else 1; float32.
    down_scales: The scales of the product that reads the hidden units, float32 [3]: of the
      activations, of the weight and of the output gradient.
    interpret: Whether the kernel runs as plain JAX, on any platform.
  """
  R, F = args[0].shape

  def kernel(scale_ref: jax.Ref, mask_ref: jax.Ref, *refs: jax.Ref) -> None:
    *arg_refs, h_ref, largest_ref = refs
    h = activate(*(ref[...].astype(jnp.float32) for ref in arg_refs)) * mask_ref[...][:, None]
    h_ref[...] = _quantized(h, scale_ref[_OF_ACTIVATIONS], ACTIVATION)
    largest_ref[...] = _largest(h)

  h_RF, largest = _call(
    kernel,
    (down_scales,),
    mask_R,
    args,
    [
      (_WHOLE, jax.ShapeDtypeStruct((R, F), ACTIVATION)),
      (_ONE, jax.ShapeDtypeStruct(_blocks(R, F), jnp.float32)),
    ],
    interpret,
  )
  return h_RF, largest.max()


def gradients(
  activate: Callable[..., jax.Array],
  dh_RF: jax.Array,
  args: tuple[jax.Array, ...],
  mask_R: jax.Array,
  up_scales: tuple[jax.Array, ...],
  down_scales: jax.Array,
  interpret: bool = False,
) -> tuple[list[QuantizedGradient], jax.Array]:
  """Returns the gradients of the arguments, and the hidden units in FP8, transposed, [F, R].

  The hidden units are activate(*args) · mask.

  Args:
    activate: An elementwise function.
    dh_RF: The gradient of the hidden units.
    args: The arguments of `activate`, [R, F] each.
    mask_R: 0 for rows of padding, else 1; float32.
    up_scales: The scales of the products that make the arguments, [3] each; see `hidden_units`.
    down_scales: Those of the product that reads the hidden units.
    interpret: Whether the kernel runs as plain JAX, on any platform.
  """
  R, F = dh_RF.shape
  n = len(args)

  def kernel(*refs: jax.Ref) -> None:
    scale_refs = refs[: n + 1]
    mask_ref, dh_ref, *rest = refs[n + 1 :]
    arg_refs, (h_ref, *out_refs) = rest[:n], rest[n:]
    values = [ref[...].astype(jnp.float32) for ref in arg_refs]
    h, gradient = jax.vjp(activate, *values)
    mask = mask_ref[...][:, None]
    h_ref[...] = _quantized(h * mask, scale_refs[n][_OF_ACTIVATIONS], ACTIVATION).T
    for k, d in enumerate(gradient(dh_ref[...].astype(jnp.float32) * mask)):
      q_ref, transposed_ref, sum_ref, largest_ref = out_refs[4 * k : 4 * k + 4]
      q = _quantized(d, scale_refs[k][_OF_GRADIENT], GRADIENT)
      q_ref[...] = q
      transposed_ref[...] = q.T
      sum_ref[...] = d.sum(0)
      largest_ref[...] = _largest(d)

  of_each = [
    (_WHOLE, jax.ShapeDtypeStruct((R, F), GRADIENT)),
    (_TRANSPOSED, jax.ShapeDtypeStruct((F, R), GRADIENT)),
    (_ROW, jax.ShapeDtypeStruct((_blocks(R, F)[0], F), jnp.float32)),
    (_ONE, jax.ShapeDtypeStruct(_blocks(R, F), jnp.float32)),
  ]
  outs = [(_TRANSPOSED, jax.ShapeDtypeStruct((F, R), ACTIVATION)), *of_each * n]
  arrays, scales = (dh_RF, *args), (*up_scales, down_scales)
  h_FR, *results = _call(kernel, scales, mask_R, arrays, outs, interpret)
  each = [QuantizedGradient(*results[4 * k : 4 * k + 4]) for k in range(n)]
  return [g._replace(sum_F=g.sum_F.sum(0), largest=g.largest.max()) for g in each], h_FR


def _call(
  kernel: Callable[..., None],
  scales: tuple[jax.Array, ...],
  mask_R: jax.Array,
  arrays: tuple[jax.Array, ...],
  outs: list[tuple[pl.BlockSpec, jax.ShapeDtypeStruct]],
  interpret: bool,
) -> list[jax.Array]:
  """Calls a kernel for each block of arrays [R, F]."""
  return pl.pallas_call(
    kernel,
    grid=_blocks(*arrays[0].shape),
    in_specs=[
      *[pl.BlockSpec((3,), lambda i, j: (0,))] * len(scales),
      pl.BlockSpec((_ROWS,), lambda i, j: (i,)),
      *[_WHOLE] * len(arrays),
    ],
    out_specs=[spec for spec, _ in outs],
    out_shape=[shape for _, shape in outs],
    compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=1),
    interpret=interpret,
    name='fp8_' + kernel.__qualname__.split('.')[0],
  )(*scales, mask_R, *arrays)


def _blocks(rows: int, columns: int) -> tuple[int, int]:
  return rows // _ROWS, columns // _COLUMNS


def _quantized(x: jax.Array, scale: jax.Array, dtype: jnp.dtype) -> jax.Array:
  largest = float(jnp.finfo(dtype).max)
  # Triton's minimum and maximum return the other number for NaN, which would hide it.
  return jnp.where(x == x, jnp.clip(x / scale, -largest, largest), x).astype(dtype)


def _largest(x: jax.Array) -> jax.Array:
  """Returns the largest absolute value of a block, or NaN if the block has any."""
  has_nan = jnp.where(x == x, 0.0, 1.0).max() > 0
  return jnp.where(has_nan, jnp.nan, jnp.abs(x).max())
