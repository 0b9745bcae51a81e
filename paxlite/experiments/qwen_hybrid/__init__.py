"""Qwen3-Next and Qwen3.5: three gated delta nets, then a block of gated attention, and so on."""

import fiddle as fdl

from paxlite.config.attribute_kinds import Shape
from paxlite.config.templates import template
from paxlite.experiments.hybrid.delta_net_layers import DeltaNetLayers
from paxlite.experiments.parts.attention import AttentionKind
from paxlite.experiments.parts.partial_positions import PartialPositions
from paxlite.experiments.parts.prediction import MultiTokenPrediction
from paxlite.experiments.parts.stack import BlockKind
from paxlite.experiments.qwen import Qwen3, Qwen3Moe
from paxlite.experiments.qwen_hybrid.output_gate import OutputGate
from paxlite.experiments.registry import register


class Qwen3_5(MultiTokenPrediction, PartialPositions, DeltaNetLayers, Qwen3, subject='Attention'):
  """Qwen3.5's text model: gated delta nets in three of four blocks, gated attention in others."""

  USE_OUTPUT_GATE: Shape[bool] = True  # learned gate of attention outputs

  VOCAB_SIZE = 248_320
  MAX_SEQ_LEN = 32_768
  DIMS_PER_HEAD = 256
  ROPE_THETA = 1e7
  ROPE_FRACTION = 0.25
  NORM_SCALE_OFFSET = 1.0
  ATTENTION_PATTERN: list[AttentionKind] = ['gated_delta', 'gated_delta', 'gated_delta', 'full']

  def further_steps(self) -> dict[str, fdl.Partial | None]:
    gate = template(
      OutputGate, model_dims=self.MODEL_DIMS, num_heads=self.NUM_HEADS, head_dim=self.DIMS_PER_HEAD
    )
    return super().further_steps() | {'gate_tpl': gate if self.USE_OUTPUT_GATE else None}

  @property
  def attention_params(self) -> int:
    gates = self.MODEL_DIMS * self.DIMS_PER_HEAD * self.NUM_HEADS
    return super().attention_params + gates * self.USE_OUTPUT_GATE

  @property
  def prediction_kind(self) -> BlockKind:
    """The kind of the block of a prediction module, which has attention in all models."""
    return super().prediction_kind._replace(attention='full')


class Qwen3_5Moe(Qwen3_5, Qwen3Moe):
  """The text model of Qwen3.5's mixtures of experts, with a gated shared expert."""

  NUM_EXPERTS = 256
  NUM_SHARED_EXPERTS = 1
  USE_SHARED_EXPERT_GATE = True


class Qwen3Next(Qwen3_5Moe):
  """Qwen3-Next: what Qwen3.5's mixtures of experts are, in another order of the tensors."""

  VOCAB_SIZE = 151_936
  NUM_EXPERTS = 512
  NUM_EXPERTS_PER_TOKEN = 10


@register
class Qwen3_5_9B(Qwen3_5):
  """8,953,803,264 parameters: the text model of Qwen3.5-9B."""

  NUM_LAYERS = 32
  NUM_HEADS = 16
  NUM_KV_HEADS = 4
  MODEL_DIMS = 4096
  HIDDEN_DIMS = 12_288
  ICI_MESH_SHAPE = [1, 8, 1]


@register
class Qwen3_5_35B_A3B(Qwen3_5Moe):
  """34,660,610,688 parameters: the text model of Qwen3.5-35B-A3B; a token uses 3 billion."""

  NUM_LAYERS = 40
  NUM_HEADS = 16
  NUM_KV_HEADS = 2
  MODEL_DIMS = 2048
  HIDDEN_DIMS = 512
  EXPERT_HIDDEN_DIMS = 512
  ICI_MESH_SHAPE = [1, 8, 1]
  DCN_MESH_SHAPE = [1, 2, 1]


@register
class Qwen3_Next_80B_A3B(Qwen3Next):
  """79,674,391,296 parameters: Qwen3-Next-80B-A3B; a token uses 3 billion of them."""

  NUM_LAYERS = 48
  NUM_HEADS = 16
  NUM_KV_HEADS = 2
  MODEL_DIMS = 2048
  HIDDEN_DIMS = 5120
  EXPERT_HIDDEN_DIMS = 512
  ICI_MESH_SHAPE = [1, 8, 1]
  DCN_MESH_SHAPE = [1, 4, 1]
