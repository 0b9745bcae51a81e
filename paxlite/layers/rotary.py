"""Rotary position embedding, https://arxiv.org/abs/2104.09864."""

import math
from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from paxlite.config.templates import Template, template_field
from paxlite.parallel.partitioning import active_platform

Layout = Literal['interleaved', 'half']

# functions that split pairs into all first and all second members, and that join them again
_LAYOUTS: dict[str, tuple[Callable, Callable]] = {
  'interleaved': (lambda x: (x[..., 0::2], x[..., 1::2]), lambda xs: jnp.stack(xs, axis=-1)),
  'half': (lambda x: jnp.split(x, 2, axis=-1), lambda xs: jnp.concatenate(xs, axis=-1)),
}


class RotaryEmbedding(nn.Module):
  """Rotates pairs of head dimensions by the angle position · theta^(−2i/H), in radians."""

  theta: float = 10_000.0  # base of the wavelengths
  # Which dimensions form a pair. 'interleaved' pairs (2i, 2i+1), as in Pax, Meta's code and GGUF.
  # 'half' pairs (i, i + H/2), as in Hugging Face. A model's query and key weights fit only one of
  # the two.
  layout: Layout = 'interleaved'

  @nn.compact
  def __call__(self, x_BTNH: jax.Array, positions_BT: jax.Array) -> jax.Array:
    half = x_BTNH.shape[-1] // 2
    positions = positions_BT[..., None, None].astype(jnp.float32)
    rotate = _by_product if active_platform() == 'tpu' else _by_pair
    return rotate(x_BTNH, positions, self.rates(half), self.layout, self.length)

  def rates(self, half: int) -> jax.Array:
    """Returns the radians per position of each pair, [half]."""
    return self.theta ** (-jnp.arange(half, dtype=jnp.float32) / half)

  @property
  def length(self) -> float:
    """The length of a rotated vector, as a multiple of its length before."""
    return 1.0


def _by_pair(
  x_BTNH: jax.Array, positions_BT11: jax.Array, rates: jax.Array, layout: Layout, length: float
) -> jax.Array:
  """Takes the pairs apart, rotates each, and puts them together again."""
  angles = positions_BT11 * rates  # [B or 1, T, 1, H/2]
  sin, cos = length * jnp.sin(angles), length * jnp.cos(angles)
  if active_platform() == 'cpu':  # XLA would compute both again for each head
    sin, cos = jax.lax.optimization_barrier((sin, cos))
  split, join = _LAYOUTS[layout]
  first, second = split(x_BTNH.astype(jnp.float32))
  y = join((first * cos - second * sin, second * cos + first * sin))
  return y.reshape(x_BTNH.shape).astype(x_BTNH.dtype)


def _by_product(
  x_BTNH: jax.Array, positions_BT11: jax.Array, rates: jax.Array, layout: Layout, length: float
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
  sin, cos = length * jnp.sin(angles), length * jnp.cos(angles)
  return _exchanged(x_BTNH, cos, sin, jnp.asarray(exchange, x_BTNH.dtype))


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


def _exchanged_backward(
  res: tuple[jax.Array, jax.Array, jax.Array], gradient_BTNH: jax.Array
) -> tuple[jax.Array, None, None, None]:
  """The transpose of a rotation is the rotation by the opposite angle."""
  cos, sin, exchange_HH = res
  return _exchanged(gradient_BTNH, cos, -sin, exchange_HH), None, None, None


_exchanged.defvjp(lambda *arrays: (_exchanged(*arrays), arrays[1:]), _exchanged_backward)


class Llama3RotaryEmbedding(RotaryEmbedding):
  """Llama 3.1's rotary embedding for longer sequences than a model was first trained on.

  Wavelengths longer than original_length / low_frequency_factor are multiplied by `factor`.
  Wavelengths shorter than original_length / high_frequency_factor do not change. Between the two,
  the rates are interpolated. This is rope_type "llama3" in Hugging Face's configs; Meta's
  `use_scaled_rope` has factor 8.
  """

  factor: float = 8.0  # multiplies the long wavelengths
  # sets the lower bound of the long wavelengths, as described above
  low_frequency_factor: float = 1.0
  # sets the upper bound of the short wavelengths, as described above
  high_frequency_factor: float = 4.0
  original_length: int = 8192  # sequence length of the first training

  def rates(self, half: int) -> jax.Array:
    rates = super().rates(half)
    turns = self.original_length * rates / (2 * math.pi)  # full rotations over the original length
    low, high = self.low_frequency_factor, self.high_frequency_factor
    kept = turns > low if low == high else jnp.clip((turns - low) / (high - low), 0, 1)
    return rates * (kept + (1 - kept) / self.factor)


class LinearRotaryEmbedding(RotaryEmbedding):
  """A rotary embedding that multiplies all wavelengths by `factor` (rope_type "linear")."""

  factor: float = 8.0

  def rates(self, half: int) -> jax.Array:
    return super().rates(half) / self.factor


class YarnRotaryEmbedding(RotaryEmbedding):
  """YaRN's rotary embedding for longer sequences, https://arxiv.org/abs/2309.00071, section 3.

  Pairs that turn fewer than `slow_turns` times over the original length get wavelengths multiplied
  by `factor`. Pairs that turn more than `fast_turns` times do not change. Between the two, the
  rates are interpolated linearly in the number of the pair.
  """

  factor: float = 4.0  # multiplies the long wavelengths
  fast_turns: float = 32.0  # sets the upper bound of the short wavelengths (beta_fast)
  slow_turns: float = 1.0  # sets the lower bound of the long wavelengths (beta_slow)
  original_length: int = 4096  # sequence length of the first training
  whole_pairs: bool = True  # whether the bounds are rounded to whole numbers of pairs
  stretched: float = 1.0  # the length of a rotated vector, as a multiple of its length before

  def rates(self, half: int) -> jax.Array:
    rates = super().rates(half)
    turning = lambda turns: (
      half * math.log(self.original_length / (turns * 2 * math.pi)) / math.log(self.theta)
    )
    low, high = turning(self.fast_turns), turning(self.slow_turns)
    if self.whole_pairs:
      low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    high += 0.001 * (low == high)
    stretched = jnp.clip((jnp.arange(half, dtype=jnp.float32) - low) / (high - low), 0, 1)
    return rates * (1 - stretched) + rates / self.factor * stretched

  @property
  def length(self) -> float:
    return self.stretched


class LongRopeRotaryEmbedding(RotaryEmbedding):
  """LongRoPE's rotary embedding, which multiplies each wavelength by its own factor.

  See https://arxiv.org/abs/2402.13753.
  """

  factors: Sequence[float] = ()  # multiplies the wavelength of each pair, [H / 2]
  stretched: float = 1.0  # the length of a rotated vector, as a multiple of its length before

  def rates(self, half: int) -> jax.Array:
    return super().rates(half) / jnp.asarray(self.factors, jnp.float32)

  @property
  def length(self) -> float:
    return self.stretched


class PartialRotary(nn.Module):
  """Rotates the first `dims` dimensions of a head, and leaves the others as they are."""

  dims: int
  rotary_tpl: Template = template_field(RotaryEmbedding)

  @nn.compact
  def __call__(self, x_BTNH: jax.Array, positions_BT: jax.Array) -> jax.Array:
    rotated = self.rotary_tpl(name='rotary')(x_BTNH[..., : self.dims], positions_BT)
    return jnp.concatenate([rotated, x_BTNH[..., self.dims :]], axis=-1)
