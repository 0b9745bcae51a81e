"""Falcon-H1: attention and Mamba 2 side by side in each block, without a dataset."""

import math

import fiddle as fdl

from paxlite.config.attribute_kinds import Function, Positive
from paxlite.config.templates import template
from paxlite.core.errors import UserError
from paxlite.experiments.falcon.layers import ScaledGatedFeedForward, SideBySide
from paxlite.experiments.hybrid.mamba2_layers import Mamba2Layers, MambaNorm
from paxlite.experiments.llama import LLaMA
from paxlite.experiments.parts.attention import AttentionKind
from paxlite.experiments.parts.embedding_factors import EmbeddingFactors
from paxlite.experiments.registry import register
from paxlite.layers.scales import Factors

_PROJECTIONS = ('gate', 'value', 'key', 'query', 'step')


class FalconH1(EmbeddingFactors, Mamba2Layers, LLaMA, subject='Falcon-H1'):
  """Falcon-H1: LLaMA's, with Mamba 2 beside attention, and factors of most activations."""

  KEY_FACTOR: Function[Positive] = 1.0  # multiplier of attention keys
  ATTENTION_IN_FACTOR: Function[float] = 1.0  # multiplier of attention inputs
  ATTENTION_OUT_FACTOR: Function[float] = 1.0  # multiplier of attention outputs
  MAMBA_IN_FACTOR: Function[float] = 1.0  # multiplier of Mamba 2 inputs
  MAMBA_OUT_FACTOR: Function[float] = 1.0  # multiplier of Mamba 2 outputs
  # In transformers' names they are z, x, B, C and dt.
  MAMBA_FACTORS: Function[list[float]] = 5 * [
    1.0
  ]  # multipliers of Mamba 2's gates, values, keys, queries and steps
  FFN_GATE_FACTOR: Function[float] = 1.0  # multiplier of the input of the activation function
  FFN_OUT_FACTOR: Function[float] = 1.0  # multiplier of feed-forward outputs

  HEADS_SPAN_MODEL = False
  ROPE_LAYOUT = 'half'
  ROPE_THETA = 1e11
  MAMBA_NORM: MambaNorm = 'none'
  MAMBA_STATE_DIMS = 256
  USE_CONVOLUTION_BIAS = True
  USE_STATE_BIAS = False
  USE_FFN_BIAS = False

  @property
  def attention_scale(self) -> float:
    return self.KEY_FACTOR / math.sqrt(self.DIMS_PER_HEAD)

  def validate(self) -> None:
    super().validate()
    if self.ATTENTION_PATTERN:
      raise UserError(
        f'ATTENTION_PATTERN={self.ATTENTION_PATTERN} must be []: all blocks of '
        f'{type(self).__name__} have attention and Mamba 2'
      )
    if not self.USE_GATED_ACTIVATION:
      raise UserError(f'{type(self).__name__} needs USE_GATED_ACTIVATION=True')
    if len(self.MAMBA_FACTORS) != len(_PROJECTIONS):
      raise UserError(
        f'MAMBA_FACTORS has {len(self.MAMBA_FACTORS)} numbers, and must have one for each of '
        f'{", ".join(_PROJECTIONS)}'
      )

  def attention(self) -> fdl.Partial:
    mamba = self.attention_with_state('mamba2')
    mamba.factors_tpl = template(
      Factors, names=_PROJECTIONS, factors=tuple(map(float, self.MAMBA_FACTORS))
    )
    return template(
      SideBySide, attention_tpl=super().attention(), state_tpl=mamba,
      attention_factors=(self.ATTENTION_IN_FACTOR, self.ATTENTION_OUT_FACTOR),
      state_factors=(self.MAMBA_IN_FACTOR, self.MAMBA_OUT_FACTOR),
    )  # fmt: skip

  def feed_forward(self, hidden_dims: int) -> fdl.Partial:
    layer = super().feed_forward(hidden_dims)
    fdl.update_callable(layer, ScaledGatedFeedForward)
    layer.gate_factor, layer.output_factor = self.FFN_GATE_FACTOR, self.FFN_OUT_FACTOR
    return layer

  def attention_params_of(self, kind: AttentionKind | None) -> int:
    return super().attention_params_of(kind) + super().attention_params_of('mamba2')

  def attention_flops_of(self, kind: AttentionKind | None) -> float:
    return super().attention_flops_of(kind) + super().attention_flops_of('mamba2')


@register
class FalconH1_0_5B(FalconH1):
  """521,411,104 parameters: Falcon-H1-0.5B."""

  NUM_LAYERS = 36
  NUM_HEADS = 8
  NUM_KV_HEADS = 2
  MODEL_DIMS = 1024
  DIMS_PER_HEAD = 64
  HIDDEN_DIMS = 2048
  VOCAB_SIZE = 32_784
  MAMBA_HEADS = 24
  MAMBA_STATE_DIMS = 128
  EMBEDDING_FACTOR = 5.656854249492381
  LOGITS_DIVISOR = 1 / 0.0390625
  KEY_FACTOR = 0.39062499999999994
  ATTENTION_OUT_FACTOR = 0.9375
  MAMBA_IN_FACTOR = 1.25
  MAMBA_OUT_FACTOR = 0.23570226039551587
  MAMBA_FACTORS = [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738]
  FFN_GATE_FACTOR = 0.8838834764831844
  FFN_OUT_FACTOR = 0.5859375
