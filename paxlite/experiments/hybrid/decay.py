"""How fast the states of heads decay, and how much of a token they take up."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from paxlite.layers.projection import Initializer
from paxlite.parallel.partitioning import param


class Decay(nn.Module):
  """−exp(log_rate) · softplus(x + bias), [B, T, N] to float32 [B, T, N]: logarithms of factors.

  The initial values are Mamba's (https://arxiv.org/abs/2312.00752, section 3.6): rates from 1 to
  `largest_rate`, and steps softplus(bias) from 0.001 to 0.1, evenly in their logarithm.
  """

  largest_rate: float = 16.0  # the largest initial rate

  @nn.compact
  def __call__(self, x_BTN: jax.Array) -> jax.Array:
    N = x_BTN.shape[-1:]
    log_rate = param(self, 'log_rate', rates_up_to(self.largest_rate), N, ['heads']).astype(
      jnp.float32
    )
    bias = param(self, 'bias', step_biases, N, ['heads']).astype(jnp.float32)
    return -jnp.exp(log_rate) * jax.nn.softplus(x_BTN.astype(jnp.float32) + bias)


class Steps(nn.Module):
  """δ = softplus(x + bias) within limits, and −exp(log_rate) · δ, [B, T, N] to two of float32.

  A state takes up δ times what a token writes, and decays by a factor whose logarithm is the second
  result (https://arxiv.org/abs/2405.21060, section 7). Initial values are those of Decay.
  """

  least: float = 0.0  # the smallest δ
  most: float = 0.0  # the largest δ; 0: no limit
  largest_rate: float = 16.0  # the largest initial rate

  @nn.compact
  def __call__(self, x_BTN: jax.Array) -> tuple[jax.Array, jax.Array]:
    N = x_BTN.shape[-1:]
    log_rate = param(self, 'log_rate', rates_up_to(self.largest_rate), N, ['heads'])
    bias = param(self, 'bias', step_biases, N, ['heads']).astype(jnp.float32)
    steps_BTN = jax.nn.softplus(x_BTN.astype(jnp.float32) + bias)
    steps_BTN = jnp.clip(steps_BTN, self.least, self.most or None)
    return steps_BTN, -jnp.exp(log_rate.astype(jnp.float32)) * steps_BTN


def rates_up_to(largest: float) -> Initializer:
  def rates(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    return jnp.log(jax.random.uniform(key, shape, dtype, 1.0, largest))

  return rates


def step_biases(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
  step = jnp.exp(jax.random.uniform(key, shape, dtype, jnp.log(0.001), jnp.log(0.1)))
  return step + jnp.log(-jnp.expm1(-step))  # the inverse of softplus
