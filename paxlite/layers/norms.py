"""Normalization, which is computed in float32 for any dtype of the activations."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from paxlite.layers.remat import recomputed
from paxlite.parallel.partitioning import active_platform, param


class LayerNorm(nn.Module):
  """(offset + scale) · (x − mean) / √(var + epsilon) + bias, [..., D] to [..., D].

  See https://arxiv.org/abs/1607.06450. The scale starts at 1 − offset. Pax stores the scale minus 1
  (offset 1), and GPT-2 stores the scale (offset 0).
  """

  epsilon: float = 1e-5
  offset: float = 1.0
  dtype: DTypeLike = jnp.float32

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    scale = _scale(self, x, self.offset)
    bias = param(self, 'bias', nn.initializers.zeros, x.shape[-1:], ['norm'])

    @recomputed
    def norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
      x = x.astype(jnp.float32)
      mean = _saveable(x.mean(-1, keepdims=True))
      # without the derivative by the mean, which is the sum of what is centered: 0
      variance = jnp.square(x - jax.lax.stop_gradient(mean)).mean(-1, keepdims=True)
      variance = _saveable(variance)
      if active_platform() in ('gpu', 'cuda'):
        # Without it, XLA fuses the moments into each use of y, which is then written to memory: a
        # kernel that reduces rows can neither transpose y nor sum over its columns.
        mean, variance = jax.lax.optimization_barrier((mean, variance))
      y = (x - mean) * jax.lax.rsqrt(variance + self.epsilon)
      return (y * (self.offset + scale) + bias).astype(self.dtype)

    return norm(x, scale, bias)


class RmsNorm(nn.Module):
  """(offset + scale) · x / √(mean(x²) + epsilon), [..., D] to [..., D].

  See https://arxiv.org/abs/1910.07467. The scale starts at 1 − offset. LLaMA has offset 0, Gemma 1.
  """

  epsilon: float = 1e-6
  offset: float = 0.0
  dtype: DTypeLike = jnp.float32

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    scale = _scale(self, x, self.offset)

    @recomputed
    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
      x = x.astype(jnp.float32)
      square = _saveable(jnp.square(x).mean(-1, keepdims=True))
      y = x * jax.lax.rsqrt(square + self.epsilon)
      return (y * (self.offset + scale)).astype(self.dtype)

    return norm(x, scale)


class UnscaledRmsNorm(nn.Module):
  """x / √(mean(x²) + epsilon), [..., D] to [..., D]: an RmsNorm without a learned scale."""

  epsilon: float = 1e-6
  dtype: DTypeLike = jnp.float32

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    @recomputed
    def norm(x: jax.Array) -> jax.Array:
      x = x.astype(jnp.float32)
      square = _saveable(jnp.square(x).mean(-1, keepdims=True))
      return (x * jax.lax.rsqrt(square + self.epsilon)).astype(self.dtype)

    return norm(x)


def _scale(module: nn.Module, x: jax.Array, offset: float) -> jax.Array:
  return param(module, 'scale', nn.initializers.constant(1 - offset), x.shape[-1:], ['norm'])


def _saveable(statistic: jax.Array) -> jax.Array:
  """Lets policies keep a statistic of each token [B, T, 1]; those of heads would not be small."""
  return checkpoint_name(statistic, 'norm_statistics') if statistic.ndim == 3 else statistic
