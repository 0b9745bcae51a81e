"""Blocks with Kimi Delta Attention between blocks of attention."""

import fiddle as fdl

from paxlite.config.attribute_kinds import Count, Shape
from paxlite.config.templates import template
from paxlite.experiments.deepseek import DeepSeekV3
from paxlite.experiments.hybrid.layers_with_state import LayersWithState
from paxlite.experiments.kimi.layers import KimiDeltaAttention, SigmoidGatedRmsNorm
from paxlite.experiments.parts.attention import AttentionKind
from paxlite.experiments.registry import register


class KimiDeltaLayers(LayersWithState, subject='Kimi Delta Attention'):
  """A LanguageModel in which ATTENTION_PATTERN may have 'kimi_delta'."""

  KDA_HEADS: Shape[Count] = 32  # heads of a Kimi Delta Attention layer
  KDA_HEAD_DIMS: Shape[Count] = 128  # width of a Kimi Delta Attention head

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
      KimiDeltaAttention, model_dims=self.MODEL_DIMS, num_heads=self.KDA_HEADS,
      head_dims=self.KDA_HEAD_DIMS, activation=self.ACTIVATION_CLS,
      convolution_tpl=self.convolution(), norm_tpl=norm,
    )  # fmt: skip

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


_KDA: list[AttentionKind] = ['kimi_delta', 'kimi_delta', 'kimi_delta', 'full_nope']


class KimiLinear(KimiDeltaLayers, DeepSeekV3):
  """Kimi Linear: a delta rule that decays by channel, latent attention, DeepSeek-V3's experts."""

  VOCAB_SIZE = 163_840
  LAYERNORM_EPSILON = 1e-5
  ROPE_LAYOUT = 'half'
  ROPE_FACTOR = 1.0
  QUERY_LATENT_DIMS = 0
  NUM_EXPERTS = 256
  NUM_EXPERTS_PER_TOKEN = 8
  NUM_EXPERT_GROUPS = 1
  NUM_EXPERT_GROUPS_PER_TOKEN = 1
  EXPERT_WEIGHT_SCALE = 2.446
  ATTENTION_PATTERN: list[AttentionKind] = _KDA


@register
class KimiLinear_48B_A3B(KimiLinear):
  """49,122,681,728 parameters: Kimi-Linear-48B-A3B; a token uses 3 billion of them."""

  NUM_LAYERS = 27
  NUM_HEADS = 32
  MODEL_DIMS = 2304
  HIDDEN_DIMS = 9216
  EXPERT_HIDDEN_DIMS = 1024
  ATTENTION_PATTERN = [*6 * _KDA, *_KDA[1:]]
  ICI_MESH_SHAPE = [1, 8, 1]
  DCN_MESH_SHAPE = [1, 2, 1]
