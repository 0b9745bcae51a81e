"""Factors of activations that are not learned."""

import jax
import jax.numpy as jnp
from flax import linen as nn


def scaled(x: jax.Array, factor: float) -> jax.Array:
  """Returns x · factor, with the factor rounded to the dtype of x."""
  return x if factor == 1 else x * jnp.asarray(factor, x.dtype)


class Scale(nn.Module):
  """x · factor, of any shape, with the factor rounded to the dtype of x."""

  factor: float

  def __call__(self, x: jax.Array) -> jax.Array:
    return scaled(x, self.factor)


class Factors(nn.Module):
  """Factors of what a layer's projections compute, by their names; see Scale."""

  names: tuple[str, ...]  # the names of projections
  factors: tuple[float, ...]  # a factor for each; other projections have none

  def __call__(self, name: str, x: jax.Array) -> jax.Array:
    return scaled(x, dict(zip(self.names, self.factors, strict=True)).get(name, 1.0))


class PositionScale(nn.Module):
  """Queries · (1 + growth · ln(1 + ⌊(position + first) / length⌋)), [B, T, N, H] to [B, T, N, H].

  The scores of a query with more keys before it are larger, so that the softmax over more keys is
  not flatter. Llama 4 and the newer models of Mistral have this scale.
  """

  growth: float  # the factor of the logarithm
  length: int  # the number of tokens after which the scale is larger for the first time
  first: int = 0  # the number of the first position

  def __call__(self, q_BTNH: jax.Array, positions_BT: jax.Array) -> jax.Array:
    whole_BT = ((positions_BT + self.first) // self.length).astype(jnp.float32)
    scale_BT = 1 + self.growth * jnp.log1p(whole_BT)
    return q_BTNH * scale_BT[..., None, None].astype(q_BTNH.dtype)
