"""Projections with int8 weights, for decoding: a token reads a quarter of float32's bytes."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from paxlite.layers.einsum import with_bias
from paxlite.layers.lora import LoraProjection
from paxlite.layers.projection import Projection
from paxlite.parallel.partitioning import gather_weight, param


class Int8Projection(Projection):
  """y = einsum(equation, x, w)·w_scale + b, for decoding only.

  w is int8, and w_scale has a float32 for each output channel. bfloat16 and float16 represent int8
  values exactly, so that the conversion to `dtype` does not round.
  """

  def product(self, x: jax.Array) -> jax.Array:
    w = param(self, 'w', nn.initializers.zeros, self.shape, self.axes, jnp.int8, self.equation)
    made = self.made_dims
    shape = [n if i in made else 1 for i, n in enumerate(self.shape)]
    axes = [axis if i in made else None for i, axis in enumerate(self.axes)]
    scale = param(self, 'w_scale', nn.initializers.ones, shape, axes)
    # without the barrier XLA moves the conversion of all weights out of the loop over tokens
    w, x = jax.lax.optimization_barrier((gather_weight(w, self.axes), x))
    y = jnp.einsum(
      self.equation,
      x.astype(self.dtype),
      w.astype(self.dtype),
      preferred_element_type=jnp.float32,  # float16 would overflow before the scale is applied
    )
    return with_bias((y * self.like_output(scale)).astype(self.dtype), self.bias())


class Int8LoraProjection(LoraProjection, Int8Projection):
  """LoraProjection with int8 weights; the low-rank factors keep their dtype."""


def quantized(w: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
  """Returns w as int8, and its float32 scale.

  The scale is the largest absolute value over the dimensions `axes`, divided by 127. These
  dimensions have size 1 in the scale.
  """
  w = w.astype(jnp.float32)
  largest = jnp.abs(w).max(axes, keepdims=True)
  scale = jnp.where(largest == 0, 1, largest) / 127
  return jnp.round(w / scale).astype(jnp.int8), scale
