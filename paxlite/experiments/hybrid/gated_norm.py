"""Norms of what heads read, with a gate before or after them."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from paxlite.parallel.partitioning import param


class GatedRmsNorm(nn.Module):
  """scale · x / √(mean(x²) + epsilon) · silu(gate), [..., H] to [..., H], in float32."""

  epsilon: float = 1e-6  # is added to the mean square
  dtype: DTypeLike = jnp.float32  # of the result

  @nn.compact
  def __call__(self, x: jax.Array, gate: jax.Array) -> jax.Array:
    scale = param(self, 'scale', nn.initializers.ones, x.shape[-1:], ['norm'])
    x = x.astype(jnp.float32)
    x = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + self.epsilon) * scale
    return (x * self.factor(gate.astype(jnp.float32))).astype(self.dtype)

  def factor(self, gate: jax.Array) -> jax.Array:
    """Returns what is multiplied, in float32."""
    return jax.nn.silu(gate)


class Gate(nn.Module):
  """x · silu(gate), of any shape, in float32: a gated norm's place without a norm."""

  dtype: DTypeLike = jnp.float32  # of the result

  def __call__(self, x: jax.Array, gate: jax.Array) -> jax.Array:
    y = x.astype(jnp.float32) * jax.nn.silu(gate.astype(jnp.float32))
    return y.astype(self.dtype)


class GateThenRmsNorm(nn.Module):
  """y = x · silu(gate), then scale · y / √(mean(y²) + epsilon), [B, T, N, H] to [B, T, N, H].

  The mean is that of a group of neighboring heads, as in Mamba 2
  (https://arxiv.org/abs/2405.21060, section 7). The computation is in float32.
  """

  num_groups: int = 1  # the number of groups of heads
  epsilon: float = 1e-6  # is added to the mean square
  dtype: DTypeLike = jnp.float32  # of the result

  @nn.compact
  def __call__(self, x_BTNH: jax.Array, gate_BTNH: jax.Array) -> jax.Array:
    y = x_BTNH.astype(jnp.float32) * jax.nn.silu(gate_BTNH.astype(jnp.float32))
    return self.normed(y).astype(self.dtype)

  def normed(self, y_BTNH: jax.Array) -> jax.Array:
    """Returns the norm of float32 [B, T, N, H]."""
    shape = y_BTNH.shape
    scale = param(self, 'scale', nn.initializers.ones, shape[2:], ['heads', 'head_dim'])
    grouped = y_BTNH.reshape(*shape[:2], self.num_groups, -1)
    factor = jax.lax.rsqrt(jnp.square(grouped).mean(-1, keepdims=True) + self.epsilon)
    return (grouped * factor).reshape(shape) * scale


class RmsNormThenGate(GateThenRmsNorm):
  """The same in the other order: scale · x / √(mean(x²) + epsilon) · silu(gate)."""

  @nn.compact
  def __call__(self, x_BTNH: jax.Array, gate_BTNH: jax.Array) -> jax.Array:
    y = self.normed(x_BTNH.astype(jnp.float32))
    return (y * jax.nn.silu(gate_BTNH.astype(jnp.float32))).astype(self.dtype)
