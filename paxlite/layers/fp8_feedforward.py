"""Feed-forward layers in FP8 with a Triton kernel between their products, forward and backward.

The numbers and the state are those of a feed-forward layer with Fp8Einsum. What one product needs
of the other is known only to the whole layer: the backward kernel quantizes the gradient of the
hidden units, transposes it, and computes the hidden units again, for products of both weights.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen import fp8_ops
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from paxlite.layers import cudnn_attention, fp8_hidden_kernel, fp8_product
from paxlite.layers.feedforward import FeedForward, GatedFeedForward, zero_padding
from paxlite.layers.fp8_hidden_kernel import QuantizedGradient
from paxlite.layers.fp8_product import Amaxes, Fp8Step
from paxlite.parallel.partitioning import active_mesh, active_platform, axes_of, shard

_LEAST_CAPABILITY = 8.9  # of a GPU that has FP8


class Operand(NamedTuple):
  """What a product in FP8 reads beside the activations, or the gradients of these arrays.

  Attributes:
    w: The weight, with the dimension that is summed over first.
    b: The bias, or None.
    scales: The scales of the activations, of the weight and of the output gradient, [3].
    amaxes: Three numbers, whose gradients are the largest absolute values of the step.
  """

  w: jax.Array
  b: jax.Array | None
  scales: jax.Array
  amaxes: Amaxes


class Fp8Operand(nn.Module):
  """Returns the operand of an Fp8Einsum with the same attributes, instead of the product."""

  equation: str
  axes: tuple[str | None, ...] | None = None

  @nn.compact
  def __call__(self, x: jax.Array, w: jax.Array, b: jax.Array | None = None) -> Operand:
    b = None if b is None else b.reshape(-1)
    return Operand(w, b, *Fp8Step(name='dot_general')())


class Fp8FeedForward(FeedForward):
  """FeedForward whose products are in FP8, with kernels between them on GPUs.

  Where the kernels do not fit, it is the same as FeedForward. They need a GPU with FP8, a mesh that
  splits nothing but the batch, bfloat16 or float16, no dropout of hidden units, another activation
  than gelu_exact, and tokens of a device and hidden units that their blocks divide.
  """

  @nn.compact
  def __call__(self, x_BTD: jax.Array, paddings_BT: jax.Array | None = None) -> jax.Array:
    if self.is_initializing() or not self._has_kernels(x_BTD):
      return super().__call__(x_BTD, paddings_BT)
    # With this einsum, a projection returns its operand, which has nothing of the activations.
    ups: Any = tuple(self.up(x_BTD, name, einsum_tpl=Fp8Operand) for name in self.up_names)
    down: Any = self.down(x_BTD, einsum_tpl=Fp8Operand)
    dtype = down.w.dtype
    mask_BT = jnp.ones(x_BTD.shape[:2], dtype) if paddings_BT is None else 1 - paddings_BT
    y_BTD = _feed_forward(self.activate, x_BTD.astype(dtype), mask_BT.astype(dtype), ups, down)
    y_BTD = shard(y_BTD, 'batch', 'residual_length', 'act_embed')
    return zero_padding(y_BTD, paddings_BT)

  def _has_kernels(self, x_BTD: jax.Array) -> bool:
    drops = self.dropout > 0 and self.has_rng('dropout')
    if drops or active_platform() not in ('gpu', 'cuda'):
      return False
    if self.activation == 'gelu_exact':  # Triton has no error function
      return False
    rows, shards = x_BTD.shape[0], _batch_shards()
    if shards == 0 or rows % shards or cudnn_attention.capability() < _LEAST_CAPABILITY:
      return False
    tokens = rows // shards * x_BTD.shape[1]
    is_half = x_BTD.dtype in (jnp.bfloat16, jnp.float16)
    return is_half and fp8_hidden_kernel.fits(tokens, self.hidden_dims)


class Fp8GatedFeedForward(Fp8FeedForward, GatedFeedForward):
  """GatedFeedForward in the same way as Fp8FeedForward."""


def _batch_shards() -> int:
  """Returns the number of devices over which the batch is split; 0 if anything else is split."""
  active = active_mesh()
  if active is None:
    return 1
  mesh, rules = active
  batch = axes_of(rules['batch'])
  others = (size for axis, size in mesh.shape.items() if axis not in batch)
  return 0 if any(size > 1 for size in others) else mesh.size


_DIMS = ((2,), (0,)), ((), ())  # x [B, T, D] times w [D, F]
_Function = Callable[..., jax.Array]
_Kept = tuple[Any, ...]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _feed_forward(
  activate: _Function, x: jax.Array, mask: jax.Array, ups: tuple[Operand, ...], down: Operand
) -> jax.Array:
  """Returns (activate(x·w1 + b1, …) · mask)·w2 + b2, [B, T, D].

  Args:
    activate: The elementwise function that makes the hidden units.
    x: Activations [B, T, D].
    mask: 0 for padding, else 1, [B, T].
    ups: The operands that make the arguments of `activate`, with weights [D, F].
    down: The operand with the weight [F, D].
  """
  return _forward(activate, x, mask, ups, down)[0]


def _forward(
  activate: _Function, x: jax.Array, mask: jax.Array, ups: tuple[Operand, ...], down: Operand
) -> tuple[jax.Array, _Kept]:
  products = [fp8_product.forward(_DIMS, x, *up) for up in ups]
  # Kept in place of the products without scale and bias, which the kernel could not read.
  args = tuple(checkpoint_name(y, 'hidden_argument') for y, _ in products)
  q_h, largest = _hidden_units(activate, args, mask, down.scales)
  y, down_kept = fp8_product.multiply(_DIMS, q_h, largest, *down[:3])
  # The kernel of the backward pass computes the hidden units again.
  down_kept = down_kept._replace(q_x=jnp.zeros((), q_h.dtype))
  return y, (args, mask, [kept for _, kept in products], down_kept)


def _backward(
  activate: _Function, kept: _Kept, g: jax.Array
) -> tuple[jax.Array, None, tuple[Operand, ...], Operand]:
  args, mask, up_kept, down_kept = kept
  q_g, down_b, down_amax = fp8_product.quantized_gradient(down_kept, g, 1)
  hidden = fp8_product.input_gradient(_DIMS, down_kept, q_g, g.dtype)
  up_scales = tuple(up.scales for up in up_kept)
  gradients, h_FR = _gradients(activate, hidden, args, mask, up_scales, down_kept.scales)

  # With the shorter side first, cuBLASLt writes what is sent; see fp8_product.
  dot = fp8_product.gradient_dot(g.dtype)
  flat = lambda q: q.reshape(-1, q.shape[-1])
  down_w = dot(flat(q_g), h_FR, (((0,), (1,)), ((), ())))
  down_w = fp8_ops.dequantize(down_w, g.dtype, down_kept.scales[0] * down_kept.scales[2]).T
  down_grad = Operand(
    down_w, down_b, jnp.zeros_like(down_kept.scales), (*down_kept.amaxes, down_amax)
  )

  x_grads, up_grads = [], []
  for up, gradient in zip(up_kept, gradients, strict=True):
    x_grads.append(fp8_product.input_gradient(_DIMS, up, gradient.q_RF, g.dtype))
    up_w = dot(flat(up.q_x), gradient.q_FR, (((0,), (1,)), ((), ())))
    up_w = fp8_ops.dequantize(up_w, g.dtype, up.scales[0] * up.scales[2])
    up_b = None if up.b is None else gradient.sum_F.astype(g.dtype)
    up_grads.append(Operand(up_w, up_b, jnp.zeros_like(up.scales), (*up.amaxes, gradient.largest)))
  return functools.reduce(jnp.add, x_grads), None, tuple(up_grads), down_grad


def _hidden_units(
  activate: _Function, args: tuple[jax.Array, ...], mask: jax.Array, down_scales: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns the hidden units in FP8, [B, T, F], and their largest absolute value."""

  def local(
    mask: jax.Array, args: tuple[jax.Array, ...], scales: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    q_h, largest = fp8_hidden_kernel.hidden_units(activate, _flat(args), mask.reshape(-1), scales)
    return q_h.reshape(args[0].shape), largest[None]

  rows = _rows()
  q_h, largest = _on_each_device(local, (rows, rows, P()), (rows, rows))(
    mask.astype(jnp.float32), args, down_scales
  )
  return q_h, largest.max()


def _gradients(
  activate: _Function,
  hidden: jax.Array,
  args: tuple[jax.Array, ...],
  mask: jax.Array,
  up_scales: tuple[jax.Array, ...],
  down_scales: jax.Array,
) -> tuple[list[QuantizedGradient], jax.Array]:
  """Returns the gradients, [B, T, F] and [F, B·T], and the hidden units in FP8, [F, B·T]."""

  def local(
    mask: jax.Array,
    arrays: tuple[jax.Array, ...],
    up_scales: tuple[jax.Array, ...],
    down_scales: jax.Array,
  ) -> tuple[list[QuantizedGradient], jax.Array]:
    flat, *args = _flat(arrays)
    gradients, h_FR = fp8_hidden_kernel.gradients(
      activate, flat, tuple(args), mask.reshape(-1), up_scales, down_scales
    )
    of_device = [
      QuantizedGradient(g.q_RF.reshape(arrays[0].shape), g.q_FR, g.sum_F[None], g.largest[None])
      for g in gradients
    ]
    return of_device, h_FR

  rows = _rows()
  columns = P(None, *rows)
  of_each = QuantizedGradient(rows, columns, rows, rows)  # type: ignore[arg-type]
  call = _on_each_device(local, (rows, rows, P(), P()), ([of_each] * len(args), columns))
  gradients, h_FR = call(mask.astype(jnp.float32), (hidden, *args), up_scales, down_scales)
  return [g._replace(sum_F=g.sum_F.sum(0), largest=g.largest.max()) for g in gradients], h_FR


def _flat(arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
  return tuple(x.reshape(-1, x.shape[-1]) for x in arrays)


def _rows() -> P:
  """Returns how a first dimension of rows, or of devices, is split."""
  active = active_mesh()
  return P() if active is None else P(axes_of(active[1]['batch']))


def _on_each_device(
  function: Callable[..., Any], in_specs: tuple[Any, ...], out_specs: tuple[Any, ...]
) -> Callable[..., Any]:
  """Returns `function` of each device's part of the arguments."""
  active = active_mesh()
  if active is None:
    return function
  return jax.shard_map(
    function, mesh=active[0], in_specs=in_specs, out_specs=out_specs, check_vma=False
  )


_feed_forward.defvjp(_forward, _backward)
