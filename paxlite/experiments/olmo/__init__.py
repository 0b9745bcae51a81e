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
from paxlite.experiments.published_models import define


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


__getattr__ = define(globals())  # the published sizes: models.json
