"""Blocks with Kimi Delta Attention between blocks of attention."""

import fiddle as fdl

from paxlite.config.attribute_kinds import Count, Shape
from paxlite.config.templates import template
from paxlite.experiments.parts.attention import AttentionKind
from paxlite.experiments.parts.layers_with_state import LayersWithState
from paxlite.layers.linear_attention.gated_norm import SigmoidGatedRmsNorm
from paxlite.layers.linear_attention.kimi_delta import KimiDeltaAttention


class KimiDeltaLayers(LayersWithState, subject='Kimi Delta Attention'):
  """A LanguageModel in which ATTENTION_PATTERN may have 'kimi_delta'."""

  KDA_HEADS: Shape[Count] = 32  # heads of a layer of Kimi Delta Attention
  KDA_HEAD_DIMS: Shape[Count] = 128  # width of such a head

  @property
  def state_kinds(self) -> set[AttentionKind]:
    return super().state_kinds | {'kimi_delta'}

  @property
  def state_classes(self) -> tuple[type, ...]:
    return (*super().state_classes, KimiDeltaAttention)

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
