"""Every matrix multiplication with a weight, as one module."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from paxlite.core.templates import Template, template_field
from paxlite.layers.einsum import Einsum
from paxlite.parallel.partitioning import gather_weight, param

Initializer = Callable[..., jax.Array]


class Projection(nn.Module):
  """y = einsum(equation, x, w) + b.

  The equation is the layout: 'BTD,ADNH->BTANH' reads [B,T,D], owns w [A,D,N,H], and its bias has
  the dimensions of w that reach the output, b [A,N,H].

  Attributes:
    equation: Einsum equation of the input and the weight, with single letters and no ellipsis.
    shape: The weight's shape.
    axes: The weight's logical axes.
    use_bias: Whether there is a bias, initialized to zero.
    w_init: Initializer of the weight.
    einsum_tpl: Multiplies.
    dtype: Dtype of the computation and the output.
  """

  equation: str
  shape: tuple[int, ...]
  axes: tuple[str | None, ...]
  use_bias: bool = True
  w_init: Initializer = nn.initializers.normal(0.02)
  einsum_tpl: Template = template_field(Einsum)
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    y = self.product(x)
    if not self.use_bias:
      return y
    made = self.made_dims
    shape, axes = [self.shape[i] for i in made], [self.axes[i] for i in made]
    b = param(self, 'b', nn.initializers.zeros, shape, axes)
    return y + self.like_output(b.astype(self.dtype))

  def product(self, x: jax.Array) -> jax.Array:
    """einsum(equation, x, w)."""
    w = param(self, 'w', self.w_init, self.shape, self.axes)
    einsum = self.einsum_tpl(equation=self.equation, name='einsum')
    return einsum(x.astype(self.dtype), gather_weight(w.astype(self.dtype), self.axes))

  @property
  def made_dims(self) -> list[int]:
    """The weight's dimensions that reach the output."""
    _, weight_dims, out_dims = self.equation.replace('->', ',').split(',')
    return [i for i, d in enumerate(weight_dims) if d in out_dims]

  def like_output(self, values: jax.Array) -> jax.Array:
    """One value for each of `made_dims`, in a shape that goes with the output's."""
    _, weight_dims, out_dims = self.equation.replace('->', ',').split(',')
    # w's dimensions keep their order in the output, so only dimensions of size 1 are missing
    sizes = {weight_dims[i]: self.shape[i] for i in self.made_dims}
    return values.reshape([sizes.get(d, 1) for d in out_dims])
