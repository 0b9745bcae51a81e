"""Blocks with short convolutions between blocks of attention."""

import fiddle as fdl

from paxlite.config.templates import template
from paxlite.experiments.parts.attention import AttentionKind
from paxlite.experiments.parts.layers_with_state import LayersWithState
from paxlite.layers.linear_attention.short_convolution import ShortConvolution


class ShortConvolutionLayers(LayersWithState, subject='Short convolutions'):
  """A LanguageModel in which ATTENTION_PATTERN may have 'short_convolution'."""

  @property
  def state_kinds(self) -> set[AttentionKind]:
    return super().state_kinds | {'short_convolution'}

  @property
  def state_classes(self) -> tuple[type, ...]:
    return (*super().state_classes, ShortConvolution)

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
