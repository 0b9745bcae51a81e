"""Granite 3, and the hybrid models of Granite 4, without a dataset."""

from paxlite.config.attribute_kinds import Function
from paxlite.experiments.granite.residual_factor import ResidualFactor
from paxlite.experiments.hybrid.mamba2_layers import Mamba2Layers
from paxlite.experiments.llama import LLaMA
from paxlite.experiments.parts.attention import AttentionKind
from paxlite.experiments.parts.embedding_factors import EmbeddingFactors
from paxlite.experiments.parts.experts import GatedExperts
from paxlite.experiments.registry import register

_MAMBA: list[AttentionKind] = ['mamba2']


class Granite(ResidualFactor, EmbeddingFactors, LLaMA, subject='Attention'):
  """Granite 3: LLaMA with factors of embeddings, attention scores, residual branches and logits."""

  VOCAB_SIZE = 49_155
  ROPE_LAYOUT = 'half'
  EMBEDDING_FACTOR = 12.0
  RESIDUAL_FACTOR = 0.22
  LOGITS_DIVISOR = 8.0

  ATTENTION_FACTOR: Function[float] = 0.015625  # multiplier of attention scores

  @property
  def attention_scale(self) -> float:
    return self.ATTENTION_FACTOR


class GraniteHybrid(Mamba2Layers, GatedExperts, Granite):
  """Granite 4: Mamba 2, few blocks of attention without positions, and all blocks with experts.

  Models without experts have as many dense blocks as layers.
  """

  VOCAB_SIZE = 100_352
  ATTENTION_PATTERN = [*5 * _MAMBA, 'full_nope', *4 * _MAMBA]
  USE_FFN_BIAS = False
  USE_CONVOLUTION_BIAS = True
  USE_STATE_BIAS = False
  NUM_EXPERTS = 64
  NUM_EXPERTS_PER_TOKEN = 6
  NUM_SHARED_EXPERTS = 1
  NORMALIZE_EXPERT_WEIGHTS = True

  @property
  def num_first_blocks(self) -> int:
    # without experts, blocks are alike from the first one on
    return super().num_first_blocks if self.has_any_experts else 0


@register
class Granite3_2B(Granite):
  """2,533,531,648 parameters: granite-3.0-2b, with tied embedding."""

  NUM_LAYERS = 40
  NUM_HEADS = 32
  NUM_KV_HEADS = 8
  MODEL_DIMS = 2048
  HIDDEN_DIMS = 8192
  SEPARATE_EMBEDDING = False
  ICI_MESH_SHAPE = [1, 8, 1]


@register
class Granite3_8B(Granite3_2B):
  """8,170,848,256 parameters: granite-3.0-8b, with tied embedding."""

  MODEL_DIMS = 4096
  HIDDEN_DIMS = 12800
  ATTENTION_FACTOR = 0.0078125
  LOGITS_DIVISOR = 16.0
