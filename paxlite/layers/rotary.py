"""Rotary position embedding, https://arxiv.org/abs/2104.09864."""

from typing import Literal

import jax
import jax.numpy as jnp
from flax import linen as nn


class RotaryEmbedding(nn.Module):
  """Rotates pairs of head dimensions by position · theta^(−2i/H).

  Attributes:
    theta: Base of the wavelengths.
    layout: Which dimensions form a pair. 'interleaved' pairs (2i, 2i+1) as Pax, Meta and GGUF have
      it; 'half' pairs (i, i + H/2) as Hugging Face has it. A model's query and key weights fit one
      of them only.
  """

  theta: float = 10_000.0
  layout: Literal['interleaved', 'half'] = 'interleaved'

  @nn.compact
  def __call__(self, x_BTNH: jax.Array, positions_BT: jax.Array) -> jax.Array:
    half = x_BTNH.shape[-1] // 2
    rates = self.theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions_BT[..., None, None].astype(jnp.float32) * rates  # [B or 1, T, 1, H/2]
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    x = x_BTNH.astype(jnp.float32)
    if self.layout == 'interleaved':
      first, second = x[..., 0::2], x[..., 1::2]
    else:
      first, second = x[..., :half], x[..., half:]
    rotated = first * cos - second * sin, second * cos + first * sin
    if self.layout == 'interleaved':
      y = jnp.stack(rotated, axis=-1).reshape(x.shape)
    else:
      y = jnp.concatenate(rotated, axis=-1)
    return y.astype(x_BTNH.dtype)
