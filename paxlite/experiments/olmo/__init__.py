"""OLMo 2, OLMo 3 and OLMoE, without a dataset."""

from typing import Literal

import fiddle as fdl

from paxlite.experiments.hybrid.delta_net_layers import DeltaNetLayers
from paxlite.experiments.llama import LLaMA
from paxlite.experiments.parts.attention import AttentionKind, QkNorm
from paxlite.experiments.parts.experts import GatedExperts
from paxlite.experiments.parts.local_positions import LocalPositions
from paxlite.experiments.parts.positions import RopeScaling
from paxlite.experiments.parts.stack import BlockKind
from paxlite.experiments.registry import register


class OLMo2(LLaMA):
  """OLMo 2: norms after sublayers and not before, norms of queries and keys over all heads."""

  VOCAB_SIZE = 100_352
  ROPE_THETA = 500_000.0
  ROPE_LAYOUT = 'half'
  LAYERNORM_EPSILON = 1e-6
  NORM_POLICY: Literal['pre', 'post', 'primer_hybrid'] = 'post'
  QK_NORM: QkNorm = 'all_heads'


class OLMo3(LocalPositions, OLMo2):
  """OLMo 3: OLMo 2 with sliding attention in three of four blocks, and YaRN in the fourth."""

  VOCAB_SIZE = 100_278
  SLIDING_WINDOW = 4096
  ATTENTION_PATTERN: list[AttentionKind] = ['sliding', 'sliding', 'sliding', 'full']
  ROPE_FACTOR = 8.0
  ROPE_SCALING: RopeScaling = 'yarn'
  ROPE_STRETCHES_LOCAL = False


class OLMoHybrid(DeltaNetLayers, OLMo2):
  """OLMo Hybrid: OLMo 2's block in every fourth place, and gated delta nets with norms before."""

  MAX_SEQ_LEN = 65_536
  ATTENTION_PATTERN: list[AttentionKind] = [
    'gated_delta', 'gated_delta', 'gated_delta', 'full_nope',
  ]  # fmt: skip
  DELTA_BETA_SCALE = 2.0
  DELTA_NORM_EPSILON = 1e-5

  def norm_policy_of(self, kind: BlockKind) -> str:
    return 'pre' if kind.attention == 'gated_delta' else super().norm_policy_of(kind)

  def block_of(self, kind: BlockKind) -> fdl.Partial:
    block = super().block_of(kind)
    if kind.attention == 'gated_delta':
      block.norm_tpl, block.post_norm_tpl = self.norm(), None
    return block


class OLMoE(GatedExperts, LLaMA):
  """OLMoE: LLaMA's block with experts, and norms of queries and keys over all heads."""

  ROPE_LAYOUT = 'half'
  QK_NORM: QkNorm = 'all_heads'
  AUX_LOSS_COEF = 0.01
  NUM_EXPERTS_PER_TOKEN = 8
  NORMALIZE_EXPERT_WEIGHTS = False


@register
class OLMoHybrid_7B(OLMoHybrid):
  """7,430,870,688 parameters: Olmo-Hybrid-7B."""

  NUM_LAYERS = 32
  NUM_HEADS = 30
  MODEL_DIMS = 3840
  HIDDEN_DIMS = 11_008
  DELTA_KEY_HEADS = 30
  DELTA_VALUE_HEADS = 30
  DELTA_KEY_DIMS = 96
  DELTA_VALUE_DIMS = 192
  ICI_MESH_SHAPE = [1, 8, 1]


@register
class OLMo2_1B(OLMo2):
  """1,484,916,736 parameters: OLMo-2-0425-1B."""

  NUM_LAYERS = 16
  NUM_HEADS = 16
  MODEL_DIMS = 2048
  HIDDEN_DIMS = 8192
  PERCORE_BATCH_SIZE = 2


@register
class OLMo2_7B(OLMo2):
  """7,298,617,344 parameters: OLMo-2-1124-7B."""

  NUM_LAYERS = 32
  NUM_HEADS = 32
  MODEL_DIMS = 4096
  HIDDEN_DIMS = 11008
  ICI_MESH_SHAPE = [1, 8, 1]


@register
class OLMo2_13B(OLMo2):
  """13,716,198,400 parameters: OLMo-2-1124-13B."""

  NUM_LAYERS = 40
  NUM_HEADS = 40
  MODEL_DIMS = 5120
  HIDDEN_DIMS = 13824
  ICI_MESH_SHAPE = [1, 8, 1]


@register
class OLMo2_32B(OLMo2):
  """32,234,279,936 parameters: OLMo-2-0325-32B."""

  NUM_LAYERS = 64
  NUM_HEADS = 40
  NUM_KV_HEADS = 8
  MODEL_DIMS = 5120
  HIDDEN_DIMS = 27648
  ICI_MESH_SHAPE = [1, 8, 1]
  DCN_MESH_SHAPE = [1, 2, 1]


@register
class OLMo3_7B(OLMo3):
  """7,298,011,136 parameters: Olmo-3-1025-7B."""

  NUM_LAYERS = 32
  NUM_HEADS = 32
  MODEL_DIMS = 4096
  HIDDEN_DIMS = 11008
  ICI_MESH_SHAPE = [1, 8, 1]


@register
class OLMo3_32B(OLMo3):
  """32,233,522,176 parameters: Olmo-3-1125-32B."""

  NUM_LAYERS = 64
  NUM_HEADS = 40
  NUM_KV_HEADS = 8
  MODEL_DIMS = 5120
  HIDDEN_DIMS = 27648
  ICI_MESH_SHAPE = [1, 8, 1]
  DCN_MESH_SHAPE = [1, 2, 1]


@register
class OLMoE_1B_7B(OLMoE):
  """6,919,161,856 parameters: OLMoE-1B-7B; a token uses 1.3 billion of them."""

  NUM_LAYERS = 16
  NUM_HEADS = 16
  MODEL_DIMS = 2048
  HIDDEN_DIMS = 1024
  VOCAB_SIZE = 50304
  ICI_MESH_SHAPE = [1, 8, 1]
