"""Norms of what heads read, with a gate before or after them."""

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


class GateThenRmsNorm(nn.Module):
  """y = x · silu(gate), then scale · y / √(mean(y²) + epsilon), [B, T, N, H] to [B, T, N, H].

  The mean is that of a group of neighboring heads, as in Mamba 2
  (https://arxiv.org/abs/2405.21060, section 7). The computation is in float32.

  Attributes:
    num_groups: The number of groups of heads.
    epsilon: Is added to the mean square.
    dtype: Of the result.
  """

  num_groups: int = 1
  epsilon: float = 1e-6
  dtype: DTypeLike = jnp.float32

  @nn.compact
  def __call__(self, x_BTNH: jax.Array, gate_BTNH: jax.Array) -> jax.Array:
    shape = x_BTNH.shape
    scale = param(self, 'scale', nn.initializers.ones, shape[2:], ['heads', 'head_dim'])
    y = x_BTNH.astype(jnp.float32) * jax.nn.silu(gate_BTNH.astype(jnp.float32))
    grouped = y.reshape(*shape[:2], self.num_groups, -1)
    factor = jax.lax.rsqrt(jnp.square(grouped).mean(-1, keepdims=True) + self.epsilon)
    return ((grouped * factor).reshape(shape) * scale).astype(self.dtype)
