"""Models whose blocks have one layer each: attention, a state, or a feed-forward layer."""

import fiddle as fdl

from paxlite.config.templates import template
from paxlite.core.errors import UserError
from paxlite.experiments.hybrid.mamba2_layers import Mamba2Layers
from paxlite.experiments.language_model import LanguageModel
from paxlite.experiments.llama import LLaMA
from paxlite.experiments.nemotron.layers import AttentionBlock, FeedForwardBlock
from paxlite.experiments.parts.attention import AttentionKind
from paxlite.experiments.parts.experts import MixtureOfExperts, Router
from paxlite.experiments.parts.stack import Activation, BlockKind

FEED_FORWARD: frozenset[AttentionKind] = frozenset(('feed_forward', 'experts'))


class SingleBlocks(LanguageModel):
  """A LanguageModel in which each of ATTENTION_PATTERN is a block with that layer alone.

  The pattern may also have 'feed_forward' and 'experts'.
  """

  @property
  def state_kinds(self) -> set[AttentionKind]:
    """The kinds of layers without keys: those with a state, and feed-forward layers."""
    return super().state_kinds | FEED_FORWARD

  def has_experts(self, block: int) -> bool:
    return self.ATTENTION_PATTERN[block % len(self.ATTENTION_PATTERN)] == 'experts'

  def validate(self) -> None:
    if not self.ATTENTION_PATTERN:
      raise UserError(f'{type(self).__name__} needs an ATTENTION_PATTERN')
    super().validate()
    if self.NORM_POLICY != 'pre':
      raise UserError(f'blocks with one layer each need NORM_POLICY=pre, not {self.NORM_POLICY}')

  @property
  def has_plain_blocks(self) -> bool:
    return False

  def block_of(self, kind: BlockKind) -> fdl.Partial:
    if kind.attention in FEED_FORWARD:
      whole = super().block_of(kind._replace(attention='full'))
      return template(
        FeedForwardBlock, norm_tpl=whole.norm_tpl, ffn_tpl=whole.ffn_tpl, dropout=whole.dropout
      )
    whole = super().block_of(kind)
    return template(
      AttentionBlock, norm_tpl=whole.norm_tpl, attention_tpl=whole.attention_tpl,
      dropout=whole.dropout,
    )  # fmt: skip

  def attention_params_of(self, kind: AttentionKind | None) -> int:
    return 0 if kind in FEED_FORWARD else super().attention_params_of(kind)

  def attention_flops_of(self, kind: AttentionKind | None) -> float:
    return 0.0 if kind in FEED_FORWARD else super().attention_flops_of(kind)

  @property
  def matmul_params(self) -> int:
    without = sum(kind.attention not in FEED_FORWARD for kind in self.block_kinds)
    return super().matmul_params - without * self.ffn_params


class NemotronH(SingleBlocks, Mamba2Layers, MixtureOfExperts, LLaMA):
  """Nemotron-H: blocks of one layer: Mamba 2, attention, experts, or a dense feed-forward layer.

  Attention has no positions, and no feed-forward layer has a gate.
  """

  VOCAB_SIZE = 131_072
  DIMS_PER_HEAD = 128
  HEADS_SPAN_MODEL = False
  ROPE_LAYOUT = 'half'
  ATTENTION_PATTERN: list[AttentionKind] = ['mamba2', 'experts', 'full_nope', 'feed_forward']
  ACTIVATION_CLS: Activation = 'relu2'
  USE_GATED_ACTIVATION = False
  MAMBA_GROUPS = 8
  MAMBA_DT_MIN = 0.001
  MAMBA_ACTIVATION_CLS: Activation = 'silu'
  USE_CONVOLUTION_BIAS = True
  USE_STATE_BIAS = False
  BLOCKS_PER_LAYER = 1
  NUM_EXPERTS = 8
  NUM_EXPERTS_PER_TOKEN = 2
  NUM_SHARED_EXPERTS = 1
  EXPERT_ACTIVATION_CLS: Activation = 'relu2'
  USE_GATED_EXPERTS = False
  USE_DROPLESS_MOE = True
  ROUTER: Router = 'balanced'
  AUX_LOSS_COEF = 0.0
