"""Hybrid models: blocks of linear attention between blocks of softmax attention."""

from typing import Literal

import fiddle as fdl
from fiddle import selectors

from paxlite.config.attribute_kinds import Count, Function, NotNegative, Positive, Shape
from paxlite.config.templates import template
from paxlite.core.errors import UserError
from paxlite.experiments.language_model import LanguageModel
from paxlite.experiments.parts.attention import AttentionKind
from paxlite.experiments.parts.feed_forward import Activation
from paxlite.layers.linear_attention.causal_convolution import CausalConvolution
from paxlite.layers.linear_attention.decay import Steps
from paxlite.layers.linear_attention.gated_delta_net import GatedDeltaNet
from paxlite.layers.linear_attention.gated_norm import (
  Gate,
  GatedRmsNorm,
  GateThenRmsNorm,
  RmsNormThenGate,
  SigmoidGatedRmsNorm,
)
from paxlite.layers.linear_attention.kimi_delta import KimiDeltaAttention
from paxlite.layers.linear_attention.kinds import LAYERS_WITH_STATE
from paxlite.layers.linear_attention.mamba2 import Mamba2
from paxlite.layers.linear_attention.short_convolution import ShortConvolution
from paxlite.layers.projection import Projection

MambaNorm = Literal['after_gate', 'before_gate', 'none']


class LayersWithState(LanguageModel, subject='Layers with a state'):
  """What the layers of all kinds with a state have in common."""

  CONVOLUTION_WIDTH: Shape[Count] = 4  # tokens that a short convolution sees
  USE_CONVOLUTION_BIAS: Shape[bool] = False  # biases of short convolutions

  @property
  def USE_STATE_BIAS(self) -> Shape[bool]:
    """Biases of the projections of layers with a state."""
    return self.USE_BIAS

  def convolution(self) -> fdl.Partial:
    """Returns the template of a short convolution."""
    return template(
      CausalConvolution, width=self.CONVOLUTION_WIDTH, use_bias=self.USE_CONVOLUTION_BIAS
    )

  def model(self) -> fdl.Config:
    lm = super().model()
    for kind in LAYERS_WITH_STATE if self.USE_STATE_BIAS != self.USE_BIAS else ():
      for layer in selectors.select(lm, kind, check_nonempty=False):
        selectors.select(layer, Projection).set(use_bias=self.USE_STATE_BIAS)
    return lm


class DeltaNetLayers(LayersWithState, subject='Gated delta net'):
  """A LanguageModel in which ATTENTION_PATTERN may have 'gated_delta'."""

  DELTA_KEY_HEADS: Shape[Count] = 16  # heads of queries and keys of a gated delta net
  DELTA_VALUE_HEADS: Shape[Count] = 32  # heads of values of a gated delta net
  DELTA_KEY_DIMS: Shape[Count] = 128  # width of such a head of queries and keys
  DELTA_VALUE_DIMS: Shape[Count] = 128  # width of such a head of values
  # 2 lets states change their sign.
  DELTA_BETA_SCALE: Function[Positive] = (
    1.0  # largest share of a key's old value that a gated delta net replaces
  )

  @property
  def DELTA_NORM_EPSILON(self) -> Function[Positive]:
    """ε of the norm of what the heads of a gated delta net read."""
    return self.LAYERNORM_EPSILON

  @property
  def state_kinds(self) -> set[AttentionKind]:
    return super().state_kinds | {'gated_delta'}

  def validate(self) -> None:
    super().validate()
    if self.DELTA_VALUE_HEADS % self.DELTA_KEY_HEADS:
      raise UserError(
        f'DELTA_VALUE_HEADS={self.DELTA_VALUE_HEADS} is not divisible by '
        f'DELTA_KEY_HEADS={self.DELTA_KEY_HEADS}'
      )

  def attention_with_state(self, kind: AttentionKind) -> fdl.Partial:
    if kind != 'gated_delta':
      return super().attention_with_state(kind)
    return template(
      GatedDeltaNet,
      model_dims=self.MODEL_DIMS,
      num_key_heads=self.DELTA_KEY_HEADS,
      num_value_heads=self.DELTA_VALUE_HEADS,
      key_dims=self.DELTA_KEY_DIMS,
      value_dims=self.DELTA_VALUE_DIMS,
      beta_scale=self.DELTA_BETA_SCALE,
      activation=self.ACTIVATION_CLS,
      convolution_tpl=self.convolution(),
      norm_tpl=template(GatedRmsNorm, epsilon=self.DELTA_NORM_EPSILON, dtype=self.FPROP_DTYPE),
    )

  def attention_params_of(self, kind: AttentionKind | None) -> int:
    if kind != 'gated_delta':
      return super().attention_params_of(kind)
    keys = self.DELTA_KEY_HEADS * self.DELTA_KEY_DIMS
    values = self.DELTA_VALUE_HEADS * self.DELTA_VALUE_DIMS
    return self.MODEL_DIMS * (2 * keys + 3 * values + 2 * self.DELTA_VALUE_HEADS)

  def attention_flops_of(self, kind: AttentionKind | None) -> float:
    """A state [K, V] is read twice and written once; the backward pass costs twice as much."""
    if kind != 'gated_delta':
      return super().attention_flops_of(kind)
    return 18.0 * self.DELTA_VALUE_HEADS * self.DELTA_KEY_DIMS * self.DELTA_VALUE_DIMS


class ShortConvolutionLayers(LayersWithState, subject='Short convolutions'):
  """A LanguageModel in which ATTENTION_PATTERN may have 'short_convolution'."""

  @property
  def state_kinds(self) -> set[AttentionKind]:
    return super().state_kinds | {'short_convolution'}

  def attention_with_state(self, kind: AttentionKind) -> fdl.Partial:
    if kind != 'short_convolution':
      return super().attention_with_state(kind)
    return template(
      ShortConvolution, model_dims=self.MODEL_DIMS, convolution_tpl=self.convolution()
    )

  def attention_params_of(self, kind: AttentionKind | None) -> int:
    if kind != 'short_convolution':
      return super().attention_params_of(kind)
    return 4 * self.MODEL_DIMS**2

  def attention_flops_of(self, kind: AttentionKind | None) -> float:
    """A channel is multiplied once with each weight; the backward pass costs twice as much."""
    if kind != 'short_convolution':
      return super().attention_flops_of(kind)
    return 6.0 * self.MODEL_DIMS * self.CONVOLUTION_WIDTH


class Mamba2Layers(LayersWithState, subject='Mamba 2'):
  """A LanguageModel in which ATTENTION_PATTERN may have 'mamba2'."""

  MAMBA_HEADS: Shape[Count] = 128  # heads of a layer of Mamba 2
  MAMBA_HEAD_DIMS: Shape[Count] = 64  # width of such a head
  MAMBA_GROUPS: Shape[Count] = 1  # groups of heads, which share what writes and reads their states
  MAMBA_STATE_DIMS: Shape[Count] = 128  # size of the state of each dimension of a head
  MAMBA_NORM: Shape[MambaNorm] = 'after_gate'  # norm of what Mamba 2 reads, and its gate's place
  MAMBA_LEAST_STEP: Function[NotNegative] = 0.0  # smallest step of a token in Mamba 2
  MAMBA_MOST_STEP: Function[NotNegative] = 0.0  # largest step of a token in Mamba 2; 0: no limit

  @property
  def MAMBA_ACTIVATION_CLS(self) -> Function[Activation]:
    """Activation function after the convolutions of Mamba 2."""
    return self.ACTIVATION_CLS

  @property
  def state_kinds(self) -> set[AttentionKind]:
    return super().state_kinds | {'mamba2'}

  def validate(self) -> None:
    super().validate()
    if self.MAMBA_HEADS % self.MAMBA_GROUPS:
      raise UserError(
        f'MAMBA_HEADS={self.MAMBA_HEADS} is not divisible by MAMBA_GROUPS={self.MAMBA_GROUPS}'
      )
    if 0 < self.MAMBA_MOST_STEP < self.MAMBA_LEAST_STEP:
      raise UserError(
        f'MAMBA_LEAST_STEP={self.MAMBA_LEAST_STEP:g} is more than '
        f'MAMBA_MOST_STEP={self.MAMBA_MOST_STEP:g}'
      )

  def attention_with_state(self, kind: AttentionKind) -> fdl.Partial:
    if kind != 'mamba2':
      return super().attention_with_state(kind)
    return template(
      Mamba2,
      model_dims=self.MODEL_DIMS,
      num_heads=self.MAMBA_HEADS,
      head_dims=self.MAMBA_HEAD_DIMS,
      num_groups=self.MAMBA_GROUPS,
      state_dims=self.MAMBA_STATE_DIMS,
      activation=self.MAMBA_ACTIVATION_CLS,
      convolution_tpl=self.convolution(),
      steps_tpl=template(Steps, least=self.MAMBA_LEAST_STEP, most=self.MAMBA_MOST_STEP),
      norm_tpl=self.mamba_norm(),
    )

  def mamba_norm(self) -> fdl.Partial:
    """Returns the template of the norm and the gate of what Mamba 2 reads."""
    if self.MAMBA_NORM == 'none':
      return template(Gate, dtype=self.FPROP_DTYPE)
    return template(
      GateThenRmsNorm if self.MAMBA_NORM == 'after_gate' else RmsNormThenGate,
      num_groups=self.MAMBA_GROUPS,
      epsilon=self.LAYERNORM_EPSILON,
      dtype=self.FPROP_DTYPE,
    )

  def attention_params_of(self, kind: AttentionKind | None) -> int:
    if kind != 'mamba2':
      return super().attention_params_of(kind)
    inner = self.MAMBA_HEADS * self.MAMBA_HEAD_DIMS
    of_groups = 2 * self.MAMBA_GROUPS * self.MAMBA_STATE_DIMS
    return self.MODEL_DIMS * (3 * inner + of_groups + self.MAMBA_HEADS)

  def attention_flops_of(self, kind: AttentionKind | None) -> float:
    """A state is read once and written once; the backward pass costs twice as much."""
    if kind != 'mamba2':
      return super().attention_flops_of(kind)
    return 12.0 * self.MAMBA_HEADS * self.MAMBA_HEAD_DIMS * self.MAMBA_STATE_DIMS


class KimiDeltaLayers(LayersWithState, subject='Kimi Delta Attention'):
  """A LanguageModel in which ATTENTION_PATTERN may have 'kimi_delta'."""

  KDA_HEADS: Shape[Count] = 32  # heads of a layer of Kimi Delta Attention
  KDA_HEAD_DIMS: Shape[Count] = 128  # width of such a head

  @property
  def state_kinds(self) -> set[AttentionKind]:
    return super().state_kinds | {'kimi_delta'}

  def attention_with_state(self, kind: AttentionKind) -> fdl.Partial:
    if kind != 'kimi_delta':
      return super().attention_with_state(kind)
    norm = template(SigmoidGatedRmsNorm, epsilon=self.LAYERNORM_EPSILON, dtype=self.FPROP_DTYPE)
    return template(
      KimiDeltaAttention,
      model_dims=self.MODEL_DIMS,
      num_heads=self.KDA_HEADS,
      head_dims=self.KDA_HEAD_DIMS,
      activation=self.ACTIVATION_CLS,
      convolution_tpl=self.convolution(),
      norm_tpl=norm,
    )

  def attention_params_of(self, kind: AttentionKind | None) -> int:
    if kind != 'kimi_delta':
      return super().attention_params_of(kind)
    inner = self.KDA_HEADS * self.KDA_HEAD_DIMS
    narrow = 2 * self.KDA_HEAD_DIMS * (self.MODEL_DIMS + inner)
    return self.MODEL_DIMS * (4 * inner + self.KDA_HEADS) + narrow

  def attention_flops_of(self, kind: AttentionKind | None) -> float:
    """A state is read twice and written once; the backward pass costs twice as much."""
    if kind != 'kimi_delta':
      return super().attention_flops_of(kind)
    return 18.0 * self.KDA_HEADS * self.KDA_HEAD_DIMS**2
