"""Rotary position embedding, https://arxiv.org/abs/2104.09864."""

import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from paxlite.parallel.partitioning import active_platform

Layout = Literal['interleaved', 'half']

# functions that split pairs into all first and all second members, and that join them again
_LAYOUTS: dict[str, tuple[Callable, Callable]] = {
  'interleaved': (lambda x: (x[..., 0::2], x[..., 1::2]), lambda xs: jnp.stack(xs, axis=-1)),
  'half': (lambda x: jnp.split(x, 2, axis=-1), lambda xs: jnp.concatenate(xs, axis=-1)),
}


class RotaryEmbedding(nn.Module):
  """Rotates pairs of head dimensions by the angle position · theta^(−2i/H), in radians.

  Attributes:
    theta: Base of the wavelengths.
    layout: Which dimensions form a pair. 'interleaved' pairs (2i, 2i+1), as in Pax, Meta's code and
      GGUF. 'half' pairs (i, i + H/2), as in Hugging Face. A model's query and key weights fit only
      one of the two.
  """

  theta: float = 10_000.0
  layout: Layout = 'interleaved'

  @nn.compact
  def __call__(self, x_BTNH: jax.Array, positions_BT: jax.Array) -> jax.Array:
    half = x_BTNH.shape[-1] // 2
    positions = positions_BT[..., None, None].astype(jnp.float32)
    rotate = _by_product if active_platform() == 'tpu' else _by_pair
    return rotate(x_BTNH, positions, self.rates(half), self.layout)

  def rates(self, half: int) -> jax.Array:
    """Returns the radians per position of each pair, [half]."""
    return self.theta ** (-jnp.arange(half, dtype=jnp.float32) / half)


def _by_pair(
  x_BTNH: jax.Array, positions_BT11: jax.Array, rates: jax.Array, layout: Layout
) -> jax.Array:
  """Takes the pairs apart, rotates each, and puts them together again."""
  angles = positions_BT11 * rates  # [B or 1, T, 1, H/2]
  sin, cos = jnp.sin(angles), jnp.cos(angles)
  split, join = _LAYOUTS[layout]
  first, second = split(x_BTNH.astype(jnp.float32))
  y = join((first * cos - second * sin, second * cos + first * sin))
  return y.reshape(x_BTNH.shape).astype(x_BTNH.dtype)


def _by_product(
  x_BTNH: jax.Array, positions_BT11: jax.Array, rates: jax.Array, layout: Layout
) -> jax.Array:
  """The same on a TPU, whose rows of 128 elements must be copied to take pairs apart.

  Each dimension's partner is put in its place by a matrix multiplication. That is exact, as each of
  its sums has one term.
  """
  H = x_BTNH.shape[-1]
  first, second = np.arange(H).reshape(2, -1) if layout == 'half' else np.arange(H).reshape(-1, 2).T
  exchange = np.zeros((H, H), np.float32)
  exchange[second, first], exchange[first, second] = -1, 1
  angles = positions_BT11 * jnp.zeros(H).at[first].set(rates).at[second].set(rates)
  return _exchanged(x_BTNH, jnp.cos(angles), jnp.sin(angles), jnp.asarray(exchange, x_BTNH.dtype))


@jax.custom_vjp
def _exchanged(
  x_BTNH: jax.Array, cos: jax.Array, sin: jax.Array, exchange_HH: jax.Array
) -> jax.Array:
  """x cos + (x · exchange) sin, with the arithmetic in float32 and one rounding."""
  partners = jnp.matmul(
    x_BTNH,
    exchange_HH,
    precision=jax.lax.Precision.HIGHEST if x_BTNH.dtype == jnp.float32 else None,
    preferred_element_type=jnp.float32,
  )
  return (x_BTNH.astype(jnp.float32) * cos + partners * sin).astype(x_BTNH.dtype)


def _exchanged_forward(x_BTNH, cos, sin, exchange_HH):
  return _exchanged(x_BTNH, cos, sin, exchange_HH), (cos, sin, exchange_HH)


def _exchanged_backward(kept, gradient_BTNH):
  """The transpose of a rotation is the rotation by the opposite angle."""
  cos, sin, exchange_HH = kept
  return _exchanged(gradient_BTNH, cos, -sin, exchange_HH), None, None, None


_exchanged.defvjp(_exchanged_forward, _exchanged_backward)


class Llama3RotaryEmbedding(RotaryEmbedding):
  """Llama 3.1's rotary embedding for longer sequences than a model was first trained on.

  Wavelengths longer than original_length / low_frequency_factor are multiplied by `factor`.
  Wavelengths shorter than original_length / high_frequency_factor do not change. Between the two,
  the rates are interpolated. This is rope_type "llama3" in Hugging Face's configs; Meta's
  `use_scaled_rope` has factor 8.

  Attributes:
    factor: Multiplies the long wavelengths.
    low_frequency_factor: Sets the lower bound of the long wavelengths, as described above.
    high_frequency_factor: Sets the upper bound of the short wavelengths, as described above.
    original_length: Sequence length of the first training.
  """

  factor: float = 8.0
  low_frequency_factor: float = 1.0
  high_frequency_factor: float = 4.0
  original_length: int = 8192

  def rates(self, half: int) -> jax.Array:
    rates = super().rates(half)
    turns = self.original_length * rates / (2 * math.pi)  # full rotations over the original length
    low, high = self.low_frequency_factor, self.high_frequency_factor
    kept = jnp.clip((turns - low) / (high - low), 0, 1)
    return rates * (kept + (1 - kept) / self.factor)
