"""Products in FP8 with delayed scaling, with the numbers and the state of flax.linen.fp8_ops.

The scales of a step follow from the histories alone. `begin_step` therefore computes them for all
layers before the model is applied, and rolls the histories after it. The layers only compute the
largest absolute values of the step. With Flax's module, each layer reduces and moves the histories
of its products, in kernels that take longer to start than to run.
"""

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.linen import fp8_ops
from jax.ad_checkpoint import checkpoint_name
from jax.lax import DotDimensionNumbers as Dims

from paxlite.config.templates import Template, template_field
from paxlite.core.trees import PyTree
from paxlite.layers.precision.dot_general_einsum import DotGeneralEinsum
from paxlite.layers.precision.einsum import FP8_LARGEST, with_bias

_HISTORY = 1024  # steps
Amaxes = tuple[jax.Array, jax.Array, jax.Array]
# The dtypes of activations, weights and output gradients, by Flax's names of their states.
_DTYPES = dict(input=jnp.float8_e4m3fn, kernel=jnp.float8_e4m3fn, output_grad=jnp.float8_e5m2)


class Fp8DotGeneral(nn.Module):
  """dot_general in FP8: e4m3 forward, e5m2 gradients, delayed scaling over 1024 steps.

  Its state has the names and shapes of Flax's Fp8DirectDotGeneralOp: scales [1] and histories
  [1024] of largest absolute values. Where the module is applied, it reads what `begin_step` made of
  that state. On GPUs with FP8, XLA turns the products into cuBLASLt's FP8 matmuls. On other devices
  XLA emulates them.
  """

  @nn.compact
  def __call__(
    self, x: jax.Array, w: jax.Array, dims: Dims, b: jax.Array | None = None
  ) -> jax.Array:
    """Returns lax.dot_general(x, w, dims) + b in w's dtype.

    Args:
      x: Activations.
      w: The weight: batch dimensions, then those that are summed over in the order of x, then those
        of the result.
      dims: The dimension numbers.
      b: A bias with the dimensions of the result that w alone has; w then has no batch dimensions.
    """
    x, collection = x.astype(w.dtype), fp8_ops.OVERWRITE_WITH_GRADIENT
    if self.is_initializing():
      for name in _DTYPES:
        self.variable(collection, f'{name}_scale', jnp.ones, 1)
        self.variable(collection, f'{name}_amax_history', jnp.zeros, _HISTORY)
      return with_bias(jax.lax.dot_general(x, w, dims), b)
    read = functools.partial(self.get_variable, collection)
    return _product(dims, x, w, b, read('scales'), read('amaxes'))


class Fp8Einsum(DotGeneralEinsum):
  """The product by Fp8DotGeneral, which adds the bias itself."""

  dot_general_tpl: Template = template_field(Fp8DotGeneral)

  def multiply(self, x: jax.Array, w: jax.Array, dims: Dims, b: jax.Array | None) -> jax.Array:
    return self.dot_general_tpl(name='dot_general')(x, w, dims, b)


def begin_step(state: Mapping[str, PyTree]) -> dict[str, PyTree]:
  """Returns what the products read in a step in place of their states.

  For each product that is `scales` [..., 3] and three `amaxes` [...], in the order of _DTYPES. The
  values of `amaxes` are not used; their gradients are the largest absolute values of the step. As
  with Flax, the next state is then the gradient of this state.

  Args:
    state: A tree of the states of products, with leading dimensions if layers are repeated.
  """
  if 'input_scale' not in state:
    return {name: begin_step(part) for name, part in state.items()}
  scales: list[jax.Array] = [
    fp8_ops.compute_scale(
      state[f'{name}_amax_history'].max(-1, keepdims=True),
      state[f'{name}_scale'],
      fp8_ops.get_fp8_max(dtype, jnp.float32),
    )
    for name, dtype in _DTYPES.items()
  ]
  all_scales = jax.lax.stop_gradient(jnp.concatenate(scales, -1))
  return {'scales': all_scales, 'amaxes': _amaxes(dict(state), all_scales)}


@jax.custom_vjp
def _amaxes(state: dict[str, jax.Array], scales: jax.Array) -> Amaxes:
  """Returns three zeros; from their gradients the backward pass makes the next state.

  They are no array [3], because each layer would then collect its numbers in kernels of their own.
  """
  zeros = jnp.zeros_like(scales[..., 0])
  return zeros, zeros, zeros


def _amaxes_backward(
  saved: tuple[dict[str, jax.Array], jax.Array], amaxes: Amaxes
) -> tuple[dict[str, jax.Array], None]:
  state, scales = saved
  new = {}
  for i, name in enumerate(_DTYPES):
    history = jnp.roll(state[f'{name}_amax_history'], -1, axis=-1)
    new[f'{name}_amax_history'] = history.at[..., 0].set(amaxes[i])
    new[f'{name}_scale'] = scales[..., i : i + 1]
  return new, None


_amaxes.defvjp(lambda *arguments: (_amaxes(*arguments), arguments), _amaxes_backward)


class Residuals(NamedTuple):
  """The values that a product saves for its backward pass."""

  q_x: jax.Array  # the activations in FP8
  q_w: jax.Array  # the weight in FP8
  b: jax.Array | None  # the bias, or None; its gradient does not depend on its values
  scales: jax.Array  # the scales of the activations, of the weight and of the output gradient, [3]
  # the largest absolute values of the activations and of the weight
  amaxes: tuple[jax.Array, jax.Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(
  dims: Dims, x: jax.Array, w: jax.Array, b: jax.Array | None, scales: jax.Array, amaxes: Amaxes
) -> jax.Array:
  return _forward(dims, x, w, b, scales, amaxes)[0]


def _forward(
  dims: Dims, x: jax.Array, w: jax.Array, b: jax.Array | None, scales: jax.Array, amaxes: Amaxes
) -> tuple[jax.Array, Residuals]:
  q_x = fp8_ops.quantize(x, _DTYPES['input'], scales[0], x.dtype)
  q_w = fp8_ops.quantize(w, _DTYPES['kernel'], scales[1], w.dtype)
  y = _scaled(dims, q_x, q_w, b, scales[0] * scales[1], w.dtype)
  # Kept by every policy: the backward pass would compute all of x again for its largest value.
  largest = tuple(checkpoint_name(a, FP8_LARGEST) for a in (_amax(x), _amax(w)))
  return y, Residuals(q_x, q_w, b, scales, largest)


def _scaled(
  dims: Dims,
  q_x: jax.Array,
  q_w: jax.Array,
  b: jax.Array | None,
  scale: jax.Array,
  dtype: jnp.dtype,
) -> jax.Array:
  """Returns (q_x·q_w) · scale + b.

  cuBLASLt multiplies by the scale and adds the bias, if the bias has one dimension and nothing else
  reads the product or the scale that was broadcast for it. Queries, keys and values of one weight,
  whose result has three dimensions, are therefore computed one by one. Computed together, they
  would be split in memory in any case, because kernels of attention read them from arrays of their
  own.
  """

  def product(q_w: jax.Array, b: jax.Array | None, scale: jax.Array) -> jax.Array:
    dot = functools.partial(jax.lax.dot_general, preferred_element_type=dtype)
    if b is None:
      return fp8_ops.dequantize(dot(q_x, q_w, dims), dtype, scale)
    flat = dot(q_x, q_w.reshape(*q_w.shape[: q_w.ndim - b.ndim], -1), dims)
    y = fp8_ops.dequantize(flat, dtype, scale) + b.reshape(-1)
    return y.reshape(*y.shape[:-1], *b.shape)

  first = _first_made(dims)
  if q_w.ndim - first <= 2:
    return product(q_w, b, scale)
  parts = q_w.shape[first]
  weights = jnp.split(q_w, parts, first)
  biases = [None] * parts if b is None else jnp.split(b, parts)
  scales = jax.lax.optimization_barrier([scale] * parts)  # so that XLA does not make them one
  return jnp.concatenate(list(map(product, weights, biases, scales)), axis=first - q_w.ndim)


def _backward(
  dims: Dims, res: Residuals, g: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array | None, None, Amaxes]:
  q_g, b_grad, amax = _quantized_gradient(res, g, res.q_w.ndim - _first_made(dims))
  w_grad = _weight_gradient(dims, res, q_g, g.dtype)
  return (_input_gradient(dims, res, q_g, g.dtype), w_grad, b_grad, None, (*res.amaxes, amax))


def _quantized_gradient(
  res: Residuals, g: jax.Array, made: int
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
  """Returns the output gradient in FP8, the gradient of the bias, and the largest absolute value.

  Args:
    res: What the product keeps for its gradients.
    g: The output gradient, whose last `made` dimensions are those that the weight alone has.
    made: The number of these dimensions.
  """
  # With the barrier, XLA quantizes g where it is computed and transposes 8 bits; without it, XLA
  # writes g, reads it again for each of the two layouts of its products, and for the sums below.
  q_g = jax.lax.optimization_barrier(
    fp8_ops.quantize(g, _DTYPES['output_grad'], res.scales[2], g.dtype)
  )
  if res.b is None:
    return q_g, None, _amax(g)
  # Both are over the same dimensions, so that XLA computes them in one pass.
  summed = tuple(range(g.ndim - made))
  return q_g, g.sum(summed), _amax(jax.lax.optimization_barrier(jnp.abs(g).max(summed)))


def _input_gradient(dims: Dims, res: Residuals, q_g: jax.Array, dtype: jnp.dtype) -> jax.Array:
  """Returns the gradient of the activations.

  Args:
    dims: The dimension numbers of the product.
    res: What the product keeps for its gradients.
    q_g: The output gradient in FP8: the batch dimensions, then those of the activations that are
      kept, then those that the weight makes.
    dtype: The dtype of the result.
  """
  (x_summed, _), (x_batch, w_batch) = dims
  w_made = range(_first_made(dims), res.q_w.ndim)
  g_made = range(q_g.ndim - len(w_made), q_g.ndim)
  x_free = _free_dims(dims, q_g.ndim - len(w_made) + len(x_summed))
  grad = _gradient_dot(dtype)(q_g, res.q_w, ((g_made, w_made), (range(len(w_batch)), w_batch)))
  grad = fp8_ops.dequantize(grad, dtype, res.scales[1] * res.scales[2])
  return grad.transpose(np.argsort([*x_batch, *x_free, *x_summed]))


def _weight_gradient(dims: Dims, res: Residuals, q_g: jax.Array, dtype: jnp.dtype) -> jax.Array:
  (_, w_summed), (x_batch, w_batch) = dims
  q_x, q_w, _, scales, _ = res
  batch, w_made = len(w_batch), range(_first_made(dims), q_w.ndim)
  x_free = _free_dims(dims, q_x.ndim)
  g_batch, g_free = range(batch), range(batch, batch + len(x_free))
  # The gradient of a weight is scattered over the model's width, which is the shorter side of most
  # weights. With this side first, cuBLASLt writes what is sent, and XLA transposes nothing.
  summed_first = np.prod(np.take(q_w.shape, w_summed)) < np.prod(np.take(q_w.shape, w_made))
  if summed_first:
    grad = _gradient_dot(dtype)(q_x, q_g, ((x_free, g_free), (x_batch, g_batch)))
  else:
    grad = _gradient_dot(dtype)(q_g, q_x, ((g_free, x_free), (g_batch, x_batch)))
  grad = fp8_ops.dequantize(grad, dtype, scales[0] * scales[2])
  if summed_first:
    return grad
  made = range(batch, batch + len(w_made))
  return grad.transpose([*g_batch, *range(batch + len(w_made), grad.ndim), *made])


def _gradient_dot(dtype: jnp.dtype) -> Callable[..., jax.Array]:
  """Returns the dot_general of the backward pass, with results of `dtype`."""
  precision = jax.lax.Precision.HIGHEST
  return functools.partial(jax.lax.dot_general, precision=precision, preferred_element_type=dtype)


def _first_made(dims: Dims) -> int:
  """Returns the index of the first dimension of the weight that is in the result alone."""
  return len(dims[0][1]) + len(dims[1][1])


def _free_dims(dims: Dims, x_dims: int) -> list[int]:
  """Returns the dimensions of the activations that are neither summed over nor of the batch."""
  return [i for i in range(x_dims) if i not in (*dims[1][0], *dims[0][0])]


def _amax(x: jax.Array) -> jax.Array:
  return jnp.abs(x).astype(jnp.float32).max()


_product.defvjp(_forward, _backward)
