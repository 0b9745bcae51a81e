"""Quantization of weights that are not trained, such as int8 with scales.

A scheme of your own is a class that is registered under a name:

    @register_scheme('four_bits')
    @dataclasses.dataclass(frozen=True)
    class FourBits(QuantizationScheme): …

FROZEN_DTYPE=four_bits then quantizes the frozen weights of projections.
"""

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp

from paxlite.core.errors import UserError

Arrays = Mapping[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class QuantizationScheme(abc.ABC):
  """Quantizes weights; subclasses say how a weight becomes arrays, and the arrays the weight.

  A weight is quantized by itself, also where a stack repeats it. `summed` are the dimensions of the
  weight that a product with activations sums over; the others are output channels.
  """

  rest = 'float32'  # the dtype of frozen variables that the scheme does not keep

  def keeps(self, name: str, shape: Sequence[int]) -> bool:
    """Returns whether the weight "…/x_layers_0/qkv/w" is kept so; no trained one may be."""
    return True

  @abc.abstractmethod
  def encode(self, w: jax.Array, summed: Sequence[int]) -> dict[str, jax.Array]:
    """Returns the arrays of a float32 weight, by name.

    Each has as many dimensions as the weight. Those that are not 1 are split over the mesh as the
    same dimensions of the weight.
    """

  @abc.abstractmethod
  def decode(self, arrays: Arrays, shape: Sequence[int]) -> jax.Array:
    """Returns the weight, of this shape, in float32."""

  def product(self, equation: str, x: jax.Array, arrays: Arrays, shape: Sequence[int]) -> jax.Array:
    """Returns einsum(equation, x, w), linear in x; a scheme may have a faster way."""
    return jnp.einsum(equation, x, self.decode(arrays, shape).astype(x.dtype))


F = TypeVar('F', bound=type[QuantizationScheme])
_SCHEMES: dict[str, type[QuantizationScheme]] = {}
DTYPES = 'float32', 'bfloat16'


def register_scheme(name: str) -> Callable[[F], F]:
  """Registers a class of schemes under a name, for FROZEN_DTYPE."""

  def register(cls: F) -> F:
    known = _SCHEMES.get(name, cls)
    is_same = known.__qualname__ == cls.__qualname__ and known.__module__ == cls.__module__
    if name in DTYPES or not is_same:  # a module may be imported again
      raise UserError(f'{name} is a dtype or another scheme: give {cls.__name__} another name')
    _SCHEMES[name] = cls
    return cls

  return register


def scheme_named(name: str) -> type[QuantizationScheme] | None:
  """Returns the class of a scheme, or None for a plain dtype; UserError if it is neither."""
  if name in DTYPES:
    return None
  if name not in _SCHEMES:
    raise UserError(f'FROZEN_DTYPE={name} must be one of {", ".join((*DTYPES, *_SCHEMES))}')
  return _SCHEMES[name]


@dataclasses.dataclass(frozen=True)
class Int8(QuantizationScheme):
  """int8 with a float32 scale for each output channel: its largest absolute value, over 127."""

  def encode(self, w: jax.Array, summed: Sequence[int]) -> dict[str, jax.Array]:
    w = w.astype(jnp.float32)
    largest = jnp.abs(w).max(tuple(summed), keepdims=True)
    scale = jnp.where(largest == 0, 1, largest) / 127
    return {'values': jnp.round(w / scale).astype(jnp.int8), 'scale': scale}

  def decode(self, arrays: Arrays, shape: Sequence[int]) -> jax.Array:
    return arrays['values'] * arrays['scale']

  def product(self, equation: str, x: jax.Array, arrays: Arrays, shape: Sequence[int]) -> jax.Array:
    # bfloat16 and float16 represent int8 exactly; float16 would overflow without the scale
    values, scale = arrays['values'].astype(x.dtype), arrays['scale']
    y = jnp.einsum(equation, x, values, preferred_element_type=jnp.float32)
    _, weight_dims, out_dims = equation.replace('->', ',').split(',')
    sizes = dict(zip(weight_dims, scale.shape, strict=True))
    return y * scale.reshape([sizes.get(d, 1) for d in out_dims])


WeightForm, register_form = QuantizationScheme, register_scheme  # their former names
