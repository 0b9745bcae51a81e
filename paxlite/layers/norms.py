"""Normalisation, in float32 whatever the activations' dtype."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from paxlite.partitioning import param


class LayerNorm(nn.Module):
  """(1 + scale) · (x − mean) / √(var + epsilon) + bias, scale and bias starting at 0 (Pax).

  [..., D] to [..., D]. https://arxiv.org/abs/1607.06450; Pax stores the scale as a difference to 1.
  """

  epsilon: float = 1e-5
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    scale = param(self, 'scale', nn.initializers.zeros, x.shape[-1:], ['norm'])
    bias = param(self, 'bias', nn.initializers.zeros, x.shape[-1:], ['norm'])
    x = x.astype(jnp.float32)
    centered = x - x.mean(-1, keepdims=True)
    variance = jnp.square(centered).mean(-1, keepdims=True)
    y = centered * jax.lax.rsqrt(variance + self.epsilon)
    return (y * (1 + scale) + bias).astype(self.dtype)


class RmsNorm(nn.Module):
  """scale · x / √(mean(x²) + epsilon), scale starting at 1. [..., D] to [..., D].

  https://arxiv.org/abs/1910.07467
  """

  epsilon: float = 1e-6
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    scale = param(self, 'scale', nn.initializers.ones, x.shape[-1:], ['norm'])
    x = x.astype(jnp.float32)
    y = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + self.epsilon)
    return (y * scale).astype(self.dtype)
