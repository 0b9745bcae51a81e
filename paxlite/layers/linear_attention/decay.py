"""How fast the states of heads decay."""

import jax
import jax.numpy as jnp
from flax import linen as nn

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
    log_rate = param(self, 'log_rate', self._rates, N, ['heads']).astype(jnp.float32)
    bias = param(self, 'bias', _steps, N, ['heads']).astype(jnp.float32)
    return -jnp.exp(log_rate) * jax.nn.softplus(x_BTN.astype(jnp.float32) + bias)

  def _rates(self, key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    return jnp.log(jax.random.uniform(key, shape, dtype, 1.0, self.largest_rate))


def _steps(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
  step = jnp.exp(jax.random.uniform(key, shape, dtype, jnp.log(0.001), jnp.log(0.1)))
  return step + jnp.log(-jnp.expm1(-step))  # the inverse of softplus
