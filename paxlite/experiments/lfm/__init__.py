"""Blocks with short convolutions between blocks of attention."""

import fiddle as fdl

from paxlite.config.templates import template
from paxlite.experiments.hybrid.layers_with_state import LayersWithState
from paxlite.experiments.lfm.layers import ShortConvolution
from paxlite.experiments.llama import LLaMA
from paxlite.experiments.parts.attention import AttentionKind, QkNorm
from paxlite.experiments.registry import register


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


_THREE: list[AttentionKind] = ['short_convolution', 'short_convolution', 'full']


class LFM2(ShortConvolutionLayers, LLaMA):
  """The architecture of LFM2: LLaMA's, with convolutions instead of most attention."""

  VOCAB_SIZE = 65_536
  ROPE_THETA = 1e6
  ROPE_LAYOUT = 'half'
  QK_NORM: QkNorm = 'per_head'
  SEPARATE_EMBEDDING = False
  CONVOLUTION_WIDTH = 3
  ATTENTION_PATTERN = _THREE


@register
class LFM2_350M(LFM2):
  """354,483,968 parameters: LFM2-350M, with tied embedding."""

  NUM_LAYERS = 16
  NUM_HEADS = 16
  NUM_KV_HEADS = 8
  MODEL_DIMS = 1024
  HIDDEN_DIMS = 4608
  ATTENTION_PATTERN = [*3 * _THREE, *3 * _THREE[1:]]


@register
class LFM2_700M(LFM2_350M):
  """742,489,344 parameters: LFM2-700M, with tied embedding."""

  NUM_HEADS = 24
  MODEL_DIMS = 1536
  HIDDEN_DIMS = 6912


@register
class LFM2_1_2B(LFM2_350M):
  """1,170,340,608 parameters: LFM2-1.2B, with tied embedding."""

  NUM_HEADS = 32
  MODEL_DIMS = 2048
  HIDDEN_DIMS = 8192
  ICI_MESH_SHAPE = [1, 8, 1]
