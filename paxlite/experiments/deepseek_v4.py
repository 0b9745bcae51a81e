"""DeepSeek-V4: hyper-connections, keys of windows, and experts that token ids choose."""

from typing import Literal

import fiddle as fdl

from paxlite.config.attribute_kinds import Function, NotNegativeInt, Positive, Shape
from paxlite.config.templates import template
from paxlite.core.errors import UserError
from paxlite.experiments.llama import LLaMA
from paxlite.experiments.parts.attention import AttentionKind
from paxlite.experiments.parts.attention_sinks import AttentionSinkLogits
from paxlite.experiments.parts.experts import MixtureOfExperts, Router, RouterScores
from paxlite.experiments.parts.feed_forward import Activation
from paxlite.experiments.parts.hyper_connections import HyperConnections
from paxlite.experiments.parts.local_positions import LocalPositions
from paxlite.experiments.parts.partial_positions import PartialPositions
from paxlite.experiments.parts.rotary_positions import RopeScaling
from paxlite.experiments.parts.stack import BlockKind
from paxlite.experiments.parts.window_keys import WindowKeys
from paxlite.experiments.registry import register
from paxlite.layers.feedforward import LimitedGatedFeedForward
from paxlite.layers.hyper_block import TokenHyperBlock
from paxlite.layers.moe.hash_router import HashRouter, RootSoftplusRouter
from paxlite.layers.moe.limited_experts import LimitedExperts
from paxlite.layers.token_ids import TokenIdLm

_Scores = Literal[RouterScores, 'root_softplus']


class DeepSeekV4(
  HyperConnections,
  WindowKeys,
  AttentionSinkLogits,
  PartialPositions,
  LocalPositions,
  MixtureOfExperts,
  LLaMA,
  subject='Experts by token ids (DeepSeek-V4)',
):
  """The architecture: each block has experts, in the first ones those of a table of token ids.

  DIMS_PER_HEAD is the whole of a head, and ROPE_FRACTION the share at its end that is rotated.
  """

  NUM_HASH_BLOCKS: Shape[NotNegativeInt] = (
    3  # first blocks, whose experts a table chooses by token ids
  )
  # The argument of the activation is at most this, and its factor within ± this.
  SWIGLU_LIMIT: Function[Positive] = 10.0  # limit of the arguments of a gated activation

  MAX_SEQ_LEN = 4096
  VOCAB_SIZE = 129_280
  LAYERNORM_EPSILON = 1e-6
  HEADS_SPAN_MODEL = False
  DIMS_PER_HEAD = 512
  NUM_KV_HEADS = 1
  QUERY_LATENT_DIMS = 1024
  USE_ATTENTION_SINKS = True
  SLIDING_WINDOW = 128
  INDEXER_TOP_K = 512
  ATTENTION_PATTERN: list[AttentionKind] = ['sparse_windows', 'windows']

  ROPE_THETA = 160_000.0
  ROPE_LOCAL_THETA = 10_000.0
  ROPE_STRETCHES_LOCAL = False
  ROPE_FRACTION = 0.125
  ROPE_SCALING: RopeScaling = 'yarn'
  ROPE_ATTENTION_FACTOR = 1.0

  BLOCKS_PER_LAYER = 1
  NUM_SHARED_EXPERTS = 1
  ROUTER: Router = 'balanced'
  ROUTER_SCORES: _Scores = 'root_softplus'  # type: ignore[assignment]
  EXPERT_WEIGHT_SCALE = 1.5
  USE_DROPLESS_MOE = True
  EXPERT_ACTIVATION_CLS: Activation = 'silu'
  USE_GATED_EXPERTS = True
  AUX_LOSS_COEF = 0.0001

  @property
  def num_first_blocks(self) -> int:
    return max(self.NUM_HASH_BLOCKS, len(self.FIRST_ATTENTION))

  @property
  def block_kinds(self) -> list[BlockKind]:
    pattern: list[AttentionKind | None] = [*self.ATTENTION_PATTERN] or [None]
    kinds = [*self.FIRST_ATTENTION, *(pattern[i % len(pattern)] for i in range(self.NUM_LAYERS))]
    return [
      BlockKind(kind, has_experts=True, variant='by_ids' if i < self.NUM_HASH_BLOCKS else '')
      for i, kind in enumerate(kinds[: self.NUM_LAYERS])
    ]

  def validate(self) -> None:
    super().validate()
    fixed: dict[str, object] = dict(
      NUM_DENSE_BLOCKS=0, BLOCKS_PER_LAYER=1, ROUTER='balanced', ROUTER_SCORES='root_softplus',
      NUM_EXPERT_GROUPS=1, USE_GATED_EXPERTS=True, USE_GATED_ACTIVATION=True, USE_ROUTER_BIAS=False,
      USE_EXPERT_BIAS=False,
    )  # fmt: skip
    for name, value in fixed.items():
      if getattr(self, name) != value:
        raise UserError(
          f'{name}={getattr(self, name)} is not implemented for {type(self).__name__}: it must be '
          f'{value}'
        )
    if self.NUM_HASH_BLOCKS and self.NUM_EXPERTS > 256 and self.FROZEN_DTYPE != 'float32':
      raise UserError(
        f'FROZEN_DTYPE={self.FROZEN_DTYPE} cannot hold the numbers of NUM_EXPERTS='
        f'{self.NUM_EXPERTS} experts of token ids: FROZEN_DTYPE=float32'
      )

  def model(self) -> fdl.Config:
    lm = super().model()
    if self.NUM_HASH_BLOCKS:
      fdl.update_callable(lm, TokenIdLm)
    return lm

  def block_of(self, kind: BlockKind) -> fdl.Partial:
    block = super().block_of(kind)
    if kind.variant == 'by_ids':
      fdl.update_callable(block, TokenHyperBlock)
      block.ffn_tpl.experts_tpl.router_tpl = template(
        HashRouter,
        top_k=self.NUM_EXPERTS_PER_TOKEN,
        normalized=self.NORMALIZE_EXPERT_WEIGHTS,
        vocab_size=self.VOCAB_SIZE,
        scale=self.EXPERT_WEIGHT_SCALE,
      )
    return block

  def router(self) -> fdl.Partial:
    router = super().router()
    fdl.update_callable(router, RootSoftplusRouter)
    return router

  def experts(self) -> fdl.Partial:
    experts = super().experts()
    fdl.update_callable(experts, LimitedExperts)
    experts.limit = self.SWIGLU_LIMIT
    return experts

  def feed_forward(self, hidden_dims: int) -> fdl.Partial:
    ffn = super().feed_forward(hidden_dims)
    fdl.update_callable(ffn, LimitedGatedFeedForward)
    ffn.limit = self.SWIGLU_LIMIT
    return ffn


@register
class DeepSeekV4_Flash(DeepSeekV4):
  """284,334,567,511 parameters: DeepSeek-V4-Flash, without its module of multi-token prediction."""

  NUM_LAYERS = 43
  NUM_HEADS = 64
  MODEL_DIMS = 4096
  NUM_EXPERTS = 256
  NUM_EXPERTS_PER_TOKEN = 6
  EXPERT_HIDDEN_DIMS = 2048
  FIRST_ATTENTION: list[AttentionKind] = ['sliding', 'sliding']
  ROPE_FACTOR = 16.0
  ROPE_ORIGINAL_LENGTH = 65536

  ICI_MESH_SHAPE = [1, 8, 1]
  DCN_MESH_SHAPE = [1, 16, 1]
