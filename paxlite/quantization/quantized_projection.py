"""Projections with frozen, quantized weights."""

from collections.abc import Callable
from typing import TypeVar

import jax
from flax.linen import meta

from paxlite.layers.precision.einsum import with_bias
from paxlite.layers.projection import Projection
from paxlite.parallel.partitioning import gather_weight
from paxlite.parallel.quantized_weights import QuantizedWeight, quantized_param
from paxlite.quantization.schemes import Arrays, Int8, QuantizationScheme

_Class = TypeVar('_Class', bound=type)


class QuantizedProjection(Projection):
  """A Projection with a quantized weight, if the scheme supports it."""

  scheme: QuantizationScheme = Int8()  # how

  def product(self, x: jax.Array) -> jax.Array:
    if not self.scheme.keeps('/'.join((*self.path, 'w')), self.shape):
      return super().product(x)
    summed = tuple(i for i in range(len(self.shape)) if i not in self.made_dims)
    weight = QuantizedWeight(self.scheme, tuple(self.shape), tuple(self.axes), summed)
    arrays = quantized_param(self, 'w', self.w_init, weight)
    gathered = {name: gather_weight(x, weight.axes_of(x)) for name, x in arrays.items()}
    y = _product(self.scheme, self.equation, weight.shape, x.astype(self.dtype), gathered)
    return with_bias(y.astype(self.dtype), self.bias())

  def stored_weight(self) -> jax.Array:
    if not self.scheme.keeps('/'.join((*self.path, 'w')), self.shape):
      return super().stored_weight()
    arrays = jax.lax.stop_gradient(meta.unbox(self.get_variable('params', 'w')))
    # as in _product: the decoded weights of all layers must not be there at a time
    return self.scheme.decode(jax.lax.optimization_barrier(arrays), self.shape)


QUANTIZED: dict[type, type] = {Projection: QuantizedProjection}


def quantizes(plain: type[Projection]) -> Callable[[_Class], _Class]:
  """Registers the class that takes the place of a projection whose weight is quantized."""

  def registered(cls: _Class) -> _Class:
    QUANTIZED[plain] = cls
    return cls

  return registered


def _product(
  scheme: QuantizationScheme, equation: str, shape: tuple[int, ...], x: jax.Array, arrays: Arrays
) -> jax.Array:
  """Returns the product; its gradient for x decodes the weight again and keeps only `arrays`."""
  like = jax.ShapeDtypeStruct(x.shape, x.dtype)

  def barrier(x: jax.Array, arrays: Arrays) -> tuple[jax.Array, Arrays]:
    # without the barrier XLA moves the decoding of all weights out of a loop over tokens or layers
    return jax.lax.optimization_barrier((x, arrays))

  def forward(x: jax.Array, arrays: Arrays) -> tuple[jax.Array, Arrays]:
    x, arrays = barrier(x, arrays)
    return scheme.product(equation, x, arrays, shape), arrays

  def backward(arrays: Arrays, grad: jax.Array) -> tuple[jax.Array, None]:
    grad, arrays = barrier(grad, arrays)
    product = lambda x: scheme.product(equation, x, arrays, shape)
    return jax.linear_transpose(product, like)(grad)[0], None

  product = jax.custom_vjp(lambda x, arrays: forward(x, arrays)[0])
  product.defvjp(forward, backward)
  return product(x, arrays)
