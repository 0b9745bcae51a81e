"""Projections with int8 weights, for decoding: a quarter of float32's memory to read a token."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from paxlite.layers.lora import LoraProjection
from paxlite.layers.projection import Projection
from paxlite.parallel.partitioning import gather_weight, param


class Int8Projection(Projection):
  """y = einsum(equation, x, w)·w_scale + b; w is int8, w_scale float32 for each output channel.

  int8 values are exact in bfloat16 and float16, so that the scale alone rounds. Not for training.
  """

  def product(self, x: jax.Array) -> jax.Array:
    w = param(self, 'w', nn.initializers.zeros, self.shape, self.axes, jnp.int8)
    made = self.made_dims
    shape = [n if i in made else 1 for i, n in enumerate(self.shape)]
    axes = [axis if i in made else None for i, axis in enumerate(self.axes)]
    scale = param(self, 'w_scale', nn.initializers.ones, shape, axes)
    # or else XLA moves the conversion of all weights out of the loop over tokens
    w, x = jax.lax.optimization_barrier((gather_weight(w, self.axes), x))
    y = jnp.einsum(
      self.equation,
      x.astype(self.dtype),
      w.astype(self.dtype),
      preferred_element_type=jnp.float32,  # without the scale float16 would overflow
    )
    return (y * self.like_output(scale)).astype(self.dtype)


class Int8LoraProjection(LoraProjection, Int8Projection):
  """LoraProjection with int8 weights; the low-rank factors keep their dtype."""


def quantized(w: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
  """w as int8 and its float32 scale, by the largest absolute value over `axes`, which stay as 1."""
  w = w.astype(jnp.float32)
  largest = jnp.abs(w).max(axes, keepdims=True)
  scale = jnp.where(largest > 0, largest, 1) / 127
  return jnp.round(w / scale).astype(jnp.int8), scale
