"""Blocks with gated delta nets between blocks of attention."""

import fiddle as fdl

from paxlite.config.attribute_kinds import Count, Function, Positive, Shape
from paxlite.config.templates import template
from paxlite.core.errors import UserError
from paxlite.experiments.hybrid.gated_delta_net import GatedDeltaNet
from paxlite.experiments.hybrid.gated_norm import GatedRmsNorm
from paxlite.experiments.hybrid.layers_with_state import LayersWithState
from paxlite.experiments.parts.attention import AttentionKind


class DeltaNetLayers(LayersWithState, subject='Gated delta net'):
  """A LanguageModel in which ATTENTION_PATTERN may have 'gated_delta'."""

  DELTA_KEY_HEADS: Shape[Count] = 16  # query and key heads of a gated delta net
  DELTA_VALUE_HEADS: Shape[Count] = 32  # value heads of a gated delta net
  DELTA_KEY_DIMS: Shape[Count] = 128  # width of a gated delta net's query and key heads
  DELTA_VALUE_DIMS: Shape[Count] = 128  # width of a gated delta net's value heads
  # 2 lets states change their sign.
  DELTA_BETA_SCALE: Function[Positive] = (
    1.0  # largest share of a key's old value that a gated delta net replaces
  )

  @property
  def DELTA_NORM_EPSILON(self) -> Function[Positive]:
    """ε of a gated delta net's output norm."""
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

  @property
  def state_classes(self) -> tuple[type, ...]:
    return (*super().state_classes, GatedDeltaNet)

  def attention_with_state(self, kind: AttentionKind) -> fdl.Partial:
    if kind != 'gated_delta':
      return super().attention_with_state(kind)
    return template(
      GatedDeltaNet, model_dims=self.MODEL_DIMS, num_key_heads=self.DELTA_KEY_HEADS,
      num_value_heads=self.DELTA_VALUE_HEADS, key_dims=self.DELTA_KEY_DIMS,
      value_dims=self.DELTA_VALUE_DIMS, beta_scale=self.DELTA_BETA_SCALE,
      activation=self.ACTIVATION_CLS, convolution_tpl=self.convolution(),
      norm_tpl=template(GatedRmsNorm, epsilon=self.DELTA_NORM_EPSILON, dtype=self.FPROP_DTYPE),
    )  # fmt: skip

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
