"""Frozen weights of four bits: two in a byte, and a scale for each output channel."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from paxlite.experiments.demo import TinyGPT
from paxlite.quantization.schemes import QuantizationScheme, register_scheme


@register_scheme('four_bits')
@dataclasses.dataclass(frozen=True)
class FourBits(QuantizationScheme):
  """Values from −7 to 7, of which a byte holds two that are neighbors in the last dimension."""

  def keeps(self, name: str, shape: Sequence[int]) -> bool:
    return shape[-1] % 2 == 0

  def encode(self, w: jax.Array, summed: Sequence[int]) -> dict[str, jax.Array]:
    scale = jnp.maximum(jnp.abs(w).max(tuple(summed), keepdims=True), 1e-9) / 7
    values = (jnp.round(w / scale) + 8).astype(jnp.uint8)
    return {'bytes': values[..., ::2] * 16 + values[..., 1::2], 'scale': scale}

  def decode(self, arrays: Mapping[str, jax.Array], shape: Sequence[int]) -> jax.Array:
    packed = arrays['bytes']
    values = jnp.stack([packed // 16, packed % 16], axis=-1).reshape(tuple(shape))
    return (values.astype(jnp.float32) - 8) * arrays['scale']


class TinyLoRA(TinyGPT):
  """LoRA beside weights of four bits."""

  USE_LORA = True
  LORA_RANK = 4
  FROZEN_DTYPE = 'four_bits'
  FPROP_DTYPE = 'float32'
  LEARNING_RATE = 1e-2
  MAX_STEPS = 6
  SUMMARY_INTERVAL_STEPS = 1
