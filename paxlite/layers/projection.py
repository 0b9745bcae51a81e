"""The module for all matrix multiplications with a weight."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from paxlite.config.templates import Template, template_field
from paxlite.layers.precision.einsum import Einsum
from paxlite.parallel.partitioning import gather_weight, param, shard

Initializer = Callable[..., jax.Array]


class Projection(nn.Module):
  """y = einsum(equation, x, w) + b.

  The equation determines all shapes: 'BTD,ADNH->BTANH' has the input [B,T,D] and the weight
  w [A,D,N,H]. The bias has the dimensions of w that are in the output, b [A,N,H].
  """

  equation: str  # einsum equation of the input and the weight, with single letters and no ellipsis
  shape: tuple[int, ...]  # the weight's shape
  axes: tuple[str | None, ...]  # the weight's logical axes
  use_bias: bool = True  # whether there is a bias, which is initialized to zero
  w_init: Initializer = nn.initializers.normal(0.02)  # initializer of the weight
  einsum_tpl: Template = template_field(Einsum)  # computes the product
  dtype: DTypeLike = jnp.float32  # dtype of the computation and of the output

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    return self.product(x)

  def product(self, x: jax.Array) -> jax.Array:
    """Returns einsum(equation, x, w) + b."""
    w = param(self, 'w', self.w_init, self.shape, self.axes, equation=self.equation)
    einsum = self.einsum_tpl(equation=self.equation, axes=self.axes, name='einsum')
    return einsum(x.astype(self.dtype), gather_weight(w.astype(self.dtype), self.axes), self.bias())

  def stored_weight(self) -> jax.Array:
    """Returns the weight, once `product` has declared it, without a gradient."""
    return jax.lax.stop_gradient(nn.meta.unbox(self.get_variable('params', 'w')))

  def bias(self) -> jax.Array | None:
    """Returns b with the rank of the output, or None. The weight must be declared before it.

    In the other order, the weight would get another random key, and other initial values.
    """
    if not self.use_bias:
      return None
    made = self.made_dims
    shape, axes = [self.shape[i] for i in made], [self.axes[i] for i in made]
    b = param(self, 'b', nn.initializers.zeros, shape, axes)
    return self.like_output(b.astype(self.dtype))

  @property
  def made_dims(self) -> list[int]:
    """The indices of the weight's dimensions that are in the output."""
    _, weight_dims, out_dims = self.equation.replace('->', ',').split(',')
    return [i for i, d in enumerate(weight_dims) if d in out_dims]

  def like_output(self, values: jax.Array) -> jax.Array:
    """Reshapes `values`, with the dimensions `made_dims`, to broadcast against the output."""
    _, weight_dims, out_dims = self.equation.replace('->', ',').split(',')
    # w's dimensions have the same order in the output, so that a reshape is enough
    sizes = {weight_dims[i]: self.shape[i] for i in self.made_dims}
    return values.reshape([sizes.get(d, 1) for d in out_dims])


def to_heads(
  template: Template, name: str, x_BTD: jax.Array, shape: tuple[int, int, int], axis: str = 'heads'
) -> jax.Array:
  """Projects [B, T, D] to heads, [B, T, N, H], by a weight of this shape [D, N, H]."""
  axes = ('embed', axis, 'head_dim')
  y: jax.Array = template(equation='BTD,DNH->BTNH', shape=shape, axes=axes, name=name)(x_BTD)
  return y


def per_head(template: Template, name: str, x_BTD: jax.Array, shape: tuple[int, int]) -> jax.Array:
  """Projects [B, T, D] to one number for each head, [B, T, N], by a weight of this shape [D, N]."""
  axes = ('embed', 'heads')
  y: jax.Array = template(equation='BTD,DN->BTN', shape=shape, axes=axes, name=name)(x_BTD)
  return y


def to_output(
  template: Template, context_BTNH: jax.Array, shape: tuple[int, int, int]
) -> jax.Array:
  """Projects what heads have read to the output of a layer, [B, T, D], by a weight [D, N, H]."""
  axes = ('embed', 'heads', 'head_dim')
  post = template(equation='BTNH,DNH->BTD', shape=shape, axes=axes, name='post')
  out_BTD = shard(post(context_BTNH), 'batch', 'residual_length', 'act_embed')
  return checkpoint_name(out_BTD, 'out_proj')
