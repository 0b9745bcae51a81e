"""A norm of each head whose result is gated."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from paxlite.parallel.partitioning import param


class GatedRmsNorm(nn.Module):
  """scale · x / √(mean(x²) + epsilon) · silu(gate), [..., H] to [..., H], in float32.

  Attributes:
    epsilon: Is added to the mean square.
    dtype: Of the result.
  """

  epsilon: float = 1e-6
  dtype: DTypeLike = jnp.float32

  @nn.compact
  def __call__(self, x: jax.Array, gate: jax.Array) -> jax.Array:
    scale = param(self, 'scale', nn.initializers.ones, x.shape[-1:], ['norm'])
    x = x.astype(jnp.float32)
    x = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + self.epsilon) * scale
    return (x * jax.nn.silu(gate.astype(jnp.float32))).astype(self.dtype)
