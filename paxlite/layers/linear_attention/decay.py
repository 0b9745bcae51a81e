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

  Attributes:
    largest_rate: The largest initial rate.
  """

  largest_rate: float = 16.0

  @nn.compact
  def __call__(self, x_BTN: jax.Array) -> jax.Array:
    N = x_BTN.shape[-1:]
    log_rate = param(self, 'log_rate', _rates_up_to(self.largest_rate), N, ['heads']).astype(
      jnp.float32
    )
    bias = param(self, 'bias', _steps, N, ['heads']).astype(jnp.float32)
    return -jnp.exp(log_rate) * jax.nn.softplus(x_BTN.astype(jnp.float32) + bias)


class ChannelDecay(nn.Module):
  """−exp(log_rate) · softplus(x + bias), [B, T, N, K] to float32 [B, T, N, K].

  The factors are those of the channels of a head, with a bias for each channel and one rate for
  each head (https://arxiv.org/abs/2510.26692, section 4). Initial values are those of Decay.

  Attributes:
    largest_rate: The largest initial rate.
  """

  largest_rate: float = 16.0

  @nn.compact
  def __call__(self, x_BTNK: jax.Array) -> jax.Array:
    heads = x_BTNK.shape[2:]
    rates = _rates_up_to(self.largest_rate)
    log_rate_N = param(self, 'log_rate', rates, heads[:1], ['heads']).astype(jnp.float32)
    bias_NK = param(self, 'bias', _steps, heads, ['heads', 'head_dim']).astype(jnp.float32)
    steps_BTNK = jax.nn.softplus(x_BTNK.astype(jnp.float32) + bias_NK)
    return -jnp.exp(log_rate_N)[:, None] * steps_BTNK


class Steps(nn.Module):
  """δ = softplus(x + bias) within limits, and −exp(log_rate) · δ, [B, T, N] to two of float32.

  A state takes up δ times what a token writes, and decays by a factor whose logarithm is the second
  result (https://arxiv.org/abs/2405.21060, section 7). Initial values are those of Decay.

  Attributes:
    least: The smallest δ.
    most: The largest δ; 0: no limit.
    largest_rate: The largest initial rate.
  """

  least: float = 0.0
  most: float = 0.0
  largest_rate: float = 16.0

  @nn.compact
  def __call__(self, x_BTN: jax.Array) -> tuple[jax.Array, jax.Array]:
    N = x_BTN.shape[-1:]
    log_rate = param(self, 'log_rate', _rates_up_to(self.largest_rate), N, ['heads'])
    bias = param(self, 'bias', _steps, N, ['heads']).astype(jnp.float32)
    steps_BTN = jax.nn.softplus(x_BTN.astype(jnp.float32) + bias)
    steps_BTN = jnp.clip(steps_BTN, self.least, self.most or None)
    return steps_BTN, -jnp.exp(log_rate.astype(jnp.float32)) * steps_BTN


def _rates_up_to(largest: float) -> Initializer:
  def rates(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    return jnp.log(jax.random.uniform(key, shape, dtype, 1.0, largest))

  return rates


def _steps(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
  step = jnp.exp(jax.random.uniform(key, shape, dtype, jnp.log(0.001), jnp.log(0.1)))
  return step + jnp.log(-jnp.expm1(-step))  # the inverse of softplus
