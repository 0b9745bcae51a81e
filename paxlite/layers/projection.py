"""Every matrix multiplication with a weight, as one module."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from paxlite.partitioning import param

Initializer = Callable[..., jax.Array]


class Projection(nn.Module):
  """y = einsum(equation, x, w) + b.

  The equation is the layout: 'BTD,KDNH->KBTNH' reads [B,T,D], owns w [K,D,N,H], and its bias has
  the dimensions of w that reach the output, b [K,N,H].

  Attributes:
    equation: Of the input and the weight, with single letters and no ellipsis.
    shape: The weight's shape.
    axes: The weight's logical axes.
    use_bias: Whether there is a bias, initialised to zero.
    w_init: Initialiser of the weight.
    dtype: Of the computation and the output.
  """

  equation: str
  shape: tuple[int, ...]
  axes: tuple[str | None, ...]
  use_bias: bool = True
  w_init: Initializer = nn.initializers.normal(0.02)
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    w = param(self, 'w', self.w_init, self.shape, self.axes)
    y = jnp.einsum(self.equation, x.astype(self.dtype), w.astype(self.dtype))
    if not self.use_bias:
      return y
    _, weight_dims, out_dims = self.equation.replace('->', ',').split(',')
    kept = [i for i, d in enumerate(weight_dims) if d in out_dims]
    b = param(
      self,
      'b',
      nn.initializers.zeros,
      [self.shape[i] for i in kept],
      [self.axes[i] for i in kept],
    )
    # w's dimensions keep their order in the output, so only dimensions of size 1 are missing
    sizes = {weight_dims[i]: self.shape[i] for i in kept}
    return y + b.astype(self.dtype).reshape([sizes.get(d, 1) for d in out_dims])
