"""The product of activations and a weight by a dot_general of another backend."""

import dataclasses

import jax
from flax import linen as nn
from jax.lax import DotDimensionNumbers

from paxlite.config.templates import Template
from paxlite.layers.precision.einsum import Einsum, with_bias


class DotGeneralEinsum(Einsum):
  """The same product by a module that takes the arguments of jax.lax.dot_general.

  The weight is transposed: batch dimensions come first, then the dimensions that are summed over,
  then those of the result. Transformer Engine needs this order.
  """

  # a module that is called with (x, w, dimension_numbers)
  dot_general_tpl: Template = dataclasses.field(kw_only=True)

  @nn.compact
  def __call__(self, x: jax.Array, w: jax.Array, b: jax.Array | None = None) -> jax.Array:
    x_dims, w_dims, out_dims = self.equation.replace('->', ',').split(',')
    batch = [d for d in w_dims if d in x_dims and d in out_dims]
    summed = [d for d in x_dims if d in w_dims and d not in out_dims]
    made = [d for d in w_dims if d not in x_dims]
    kept = [d for d in x_dims if d not in w_dims]
    w = w.transpose([w_dims.index(d) for d in batch + summed + made])
    n = len(batch)
    contracting = tuple(map(x_dims.index, summed)), tuple(range(n, n + len(summed)))
    batching = tuple(map(x_dims.index, batch)), tuple(range(n))
    b = None if b is None else b.reshape(w.shape[n + len(summed) :])
    y = self.multiply(x, w, (contracting, batching), b)
    y_dims = batch + kept + made
    return y.transpose([y_dims.index(d) for d in out_dims])

  def multiply(
    self, x: jax.Array, w: jax.Array, dims: DotDimensionNumbers, b: jax.Array | None
  ) -> jax.Array:
    """Returns lax.dot_general(x, w, dims) + b, where b has the dimensions that w alone has."""
    y = self.dot_general_tpl(name='dot_general')(x, w, dims)
    return with_bias(y, b)
