"""Attention to windows of the text by one key each: its attributes and its templates."""

from collections.abc import Iterable
from typing import Any, Literal

import fiddle as fdl
from fiddle import selectors

from paxlite.config.attribute_kinds import Count, Function, NotNegativeInt, Positive, Shape
from paxlite.config.templates import template
from paxlite.core.errors import UserError
from paxlite.experiments.deepseek_v4.blocks import (
  EqualStreams,
  HashRouter,
  HyperBlock,
  HyperConnection,
  LimitedExperts,
  LimitedGatedFeedForward,
  MergedStreams,
  RootSoftplusRouter,
  TokenHyperBlock,
  TokenIdLm,
  TrailingRotary,
)
from paxlite.experiments.deepseek_v4.windows import (
  KeyCompressor,
  OverlappingKeyCompressor,
  SharedKeyAttention,
  WindowAttention,
  WindowIndexer,
)
from paxlite.experiments.language_model import LanguageModel
from paxlite.experiments.llama import LLaMA
from paxlite.experiments.parts.attention import AttentionKind
from paxlite.experiments.parts.attention_sinks import AttentionSinkLogits
from paxlite.experiments.parts.experts import GatedExperts, Router, RouterScores
from paxlite.experiments.parts.latent_queries import Indexers
from paxlite.experiments.parts.local_positions import LocalPositions
from paxlite.experiments.parts.partial_positions import PartialPositions
from paxlite.experiments.parts.positions import RopeScaling
from paxlite.experiments.parts.stack import BlockKind
from paxlite.experiments.registry import register
from paxlite.layers.attention.attention import AttentionSinks
from paxlite.layers.norms import UnscaledRmsNorm
from paxlite.layers.projection import Projection
from paxlite.layers.rotary import PartialRotary


class HyperConnections(LanguageModel, subject='Hyper-connections'):
  """A LanguageModel whose blocks read and write several streams of activations.

  The first block of the stack makes the streams of the embeddings, and the last one merges them.
  """

  HYPER_CONNECTION_STREAMS: Shape[Count] = 4  # activation streams between blocks
  HYPER_CONNECTION_SINKHORN_ITERATIONS: Function[Count] = (
    20  # column normalizations of the stream-mixing matrix
  )
  HYPER_CONNECTION_EPSILON: Function[Positive] = (
    1e-6  # ε added to stream weights and to their normalizing sums
  )

  def validate(self) -> None:
    if self.num_stages > 1:
      raise UserError(
        f'HYPER_CONNECTION_STREAMS={self.HYPER_CONNECTION_STREAMS} needs a mesh without an '
        'axis stage: the first and the last block of the stack are not like the others'
      )
    super().validate()
    if self.NORM_POLICY != 'pre':
      raise UserError(f'blocks with hyper-connections need NORM_POLICY=pre, not {self.NORM_POLICY}')

  @property
  def has_plain_blocks(self) -> bool:
    return False

  @property
  def takes_modules(self) -> bool:
    return False  # which would read several streams

  def block(self) -> fdl.Partial:
    return template(
      HyperBlock,
      norm_tpl=self.norm(),
      connection_tpl=template(
        HyperConnection, iterations=self.HYPER_CONNECTION_SINKHORN_ITERATIONS, **self._of_streams
      ),
      attention_tpl=self.attention(),
      ffn_tpl=self.feed_forward(self.HIDDEN_DIMS),
      dropout=self.DROPOUT_PROB,
    )

  def stack(self) -> fdl.Partial:
    stack = super().stack()
    stack.first_tpls = [
      template(EqualStreams, num_streams=self.HYPER_CONNECTION_STREAMS),
      *stack.first_tpls,
    ]
    stack.last_tpls = [*stack.last_tpls, template(MergedStreams, **self._of_streams)]
    return stack

  @property
  def block_names(self) -> list[str]:
    names = (name.partition('first_') for name in super().block_names)
    return [name if not number else f'first_{int(number) + 1}' for name, _, number in names]

  @property
  def merging_name(self) -> str:
    """The name of the block that merges the streams, in the variables of the stack."""
    return f'last_{sum(name.startswith("last_") for name in super().block_names)}'

  @property
  def _of_streams(self) -> dict[str, object]:
    return dict(floor=self.HYPER_CONNECTION_EPSILON, epsilon=self.LAYERNORM_EPSILON)

  @property
  def matmul_params(self) -> int:
    N = self.HYPER_CONNECTION_STREAMS
    weights = 2 * self.NUM_LAYERS * (2 * N + N * N) + N
    return super().matmul_params + weights * N * self.MODEL_DIMS


_WINDOWS: set[AttentionKind] = {'sparse_windows', 'windows'}


class WindowKeys(Indexers, subject='Compressed keys (DeepSeek-V4)'):
  """A LanguageModel with one key for all heads, and blocks whose queries see windows by a key each.

  A query sees the latest tokens in all blocks ('sliding'). In those of 'windows', it sees a key for
  each complete window of its text; in those of 'sparse_windows', keys of other windows, which
  overlap, and of which an indexer chooses.
  """

  KV_COMPRESSION_RATIO: Function[Count] = 128  # tokens per compressed key
  SPARSE_KV_COMPRESSION_RATIO: Function[Count] = (
    4  # tokens per compressed key where an indexer selects; keys also read the window before
  )
  OUTPUT_GROUPS: Shape[Count] = 8  # head groups with separate output projections
  OUTPUT_GROUP_DIMS: Shape[Count] = 1024  # output width of a head group's projection
  # Kinds of attention of the first blocks, before ATTENTION_PATTERN begins.
  FIRST_ATTENTION: Function[list[AttentionKind]] = []  # attention kinds of the first blocks

  @property
  def state_kinds(self) -> set[AttentionKind]:
    """The kinds of attention that the model may have, and that are no usual attention."""
    return super().state_kinds | _WINDOWS

  @property
  def windows(self) -> list[int]:
    kinds = {kind.attention for kind in self.block_kinds}
    return [self.SLIDING_WINDOW if self.SLIDING_WINDOW < self.MAX_SEQ_LEN else 0][
      : 'sliding' in kinds
    ]

  def validate(self) -> None:
    super().validate()
    name = type(self).__name__
    kinds: list[AttentionKind] = [*self.FIRST_ATTENTION, *self.ATTENTION_PATTERN]
    if not self.ATTENTION_PATTERN or (set(kinds) - _WINDOWS - {'sliding'}):
      raise UserError(
        f'FIRST_ATTENTION={self.FIRST_ATTENTION} and ATTENTION_PATTERN={self.ATTENTION_PATTERN} of '
        f'{name} must have sliding, sparse_windows and windows, and the pattern at least one'
      )
    if self.SLIDING_WINDOW <= 0:
      raise UserError(f'attention of {name} needs a SLIDING_WINDOW above 0')
    if self.NUM_HEADS % self.OUTPUT_GROUPS:
      raise UserError(
        f'NUM_HEADS={self.NUM_HEADS} is not divisible by OUTPUT_GROUPS={self.OUTPUT_GROUPS}'
      )
    if 'sparse_windows' in kinds and self.rotary_dims > self.INDEXER_DIMS_PER_HEAD:
      raise UserError(
        f'INDEXER_DIMS_PER_HEAD={self.INDEXER_DIMS_PER_HEAD} must be at least the '
        f'{self.rotary_dims} rotated dimensions of a head'
      )
    fixed: dict[str, object] = dict(
      NUM_KV_HEADS=1, USE_ATTENTION_SINKS=True, USE_ROTARY_POSITION_EMB=True, QK_NORM='none',
      USE_PER_DIM_SCALE=False, ATTENTION_TEMPERATURE_SCALE=0, USE_BIAS=False,
      USE_QKV_BIAS=False,
    )  # fmt: skip
    for attribute, value in fixed.items():
      if (found := getattr(self, attribute, value)) != value:  # parts may be absent
        raise UserError(
          f'{attribute}={found} is not supported for attention of {name}: it must be {value}'
        )
    if self.ATTEN_LOGIT_CAP > 0:
      raise UserError(
        f'ATTEN_LOGIT_CAP={self.ATTEN_LOGIT_CAP:g} is not supported for attention of {name}: it '
        'must be at most 0'
      )

  def rotary(self, is_local: bool = False) -> fdl.Partial:
    rotary = super().rotary(is_local)
    if fdl.get_callable(rotary) is PartialRotary:
      rotary = rotary.rotary_tpl
    return template(TrailingRotary, dims=self.rotary_dims, rotary_tpl=rotary)

  def attention(self) -> fdl.Partial:
    return template(
      SharedKeyAttention,
      model_dims=self.MODEL_DIMS,
      num_heads=self.NUM_HEADS,
      head_dim=self.DIMS_PER_HEAD,
      query_latent_dims=self.QUERY_LATENT_DIMS,
      num_groups=self.OUTPUT_GROUPS,
      group_dims=self.OUTPUT_GROUP_DIMS,
      norm_tpl=self.norm(),
      query_norm_tpl=template(
        UnscaledRmsNorm, epsilon=self.LAYERNORM_EPSILON, dtype=self.FPROP_DTYPE
      ),
      rotary_tpl=self.rotary(),
      attention_tpl=self.dot_product_attention(),
    )

  def attention_with_state(self, kind: AttentionKind) -> fdl.Partial:
    if kind not in _WINDOWS:
      return super().attention_with_state(kind)
    attention = self.attention()
    attention.attention_tpl = template(
      WindowAttention, query_scale=self.attention_scale, window=self.SLIDING_WINDOW,
      sinks_tpl=template(AttentionSinks, num_heads=self.NUM_HEADS), dropout=self.DROPOUT_PROB,
      block_size=self.ATTENTION_BLOCK_SIZE,
    )  # fmt: skip
    of_keys: dict[str, Any] = dict(norm_tpl=self.norm(), rotary_tpl=self.rotary())
    if kind == 'windows':
      attention.rate = self.KV_COMPRESSION_RATIO
      attention.keys_tpl = template(KeyCompressor, **of_keys)
      return attention
    attention.rate = self.SPARSE_KV_COMPRESSION_RATIO
    attention.keys_tpl = template(OverlappingKeyCompressor, **of_keys)
    attention.selection_tpl = template(
      WindowIndexer, model_dims=self.MODEL_DIMS, query_latent_dims=self.QUERY_LATENT_DIMS,
      num_heads=self.INDEXER_HEADS, head_dim=self.INDEXER_DIMS_PER_HEAD, top_k=self.INDEXER_TOP_K,
      keys_tpl=template(OverlappingKeyCompressor, norm_tpl=self.norm(), rotary_tpl=self.rotary()),
      rotary_tpl=self.rotary(),
    )  # fmt: skip
    return attention

  @property
  def attention_classes(self) -> tuple[type, ...]:
    return (*super().attention_classes, SharedKeyAttention)

  def without_factors(self, layer: fdl.Buildable) -> Iterable[fdl.Buildable]:
    """Returns the groups of heads too, and the indexer, whose choice has no gradient."""
    yield from super().without_factors(layer)
    if isinstance(groups := getattr(layer, 'groups_tpl', None), fdl.Buildable):
      yield groups
    for indexer in selectors.select(layer, WindowIndexer, check_nonempty=False):
      yield from selectors.select(indexer, Projection)

  def attention_params_of(self, kind: AttentionKind | None) -> int:
    D, N, H, Q = self.MODEL_DIMS, self.NUM_HEADS, self.DIMS_PER_HEAD, self.QUERY_LATENT_DIMS
    G, R = self.OUTPUT_GROUPS, self.OUTPUT_GROUP_DIMS
    found = Q * (D + N * H) + D * H + N * H * R + G * R * D
    return found + {'windows': 2, 'sparse_windows': 4}.get(str(kind), 0) * D * H

  def attention_flops_of(self, kind: AttentionKind | None) -> float:
    """Returns the same with the windows that a query sees, and with the indexer's forward pass."""
    T, N = self.MAX_SEQ_LEN, self.NUM_HEADS
    found = super().attention_flops_of('sliding')
    if kind == 'windows':
      return found + 12.0 * N * self.DIMS_PER_HEAD * T / (2 * self.KV_COMPRESSION_RATIO)
    if kind != 'sparse_windows':
      return found
    W, D, H = T / self.SPARSE_KV_COMPRESSION_RATIO, self.MODEL_DIMS, self.INDEXER_DIMS_PER_HEAD
    k = min(self.INDEXER_TOP_K, W)
    found += 12.0 * N * self.DIMS_PER_HEAD * (k - k**2 / (2 * W))
    if self.INDEXER_TOP_K >= W:
      return found
    weights = self.QUERY_LATENT_DIMS * self.INDEXER_HEADS * H + D * (self.INDEXER_HEADS + 4 * H)
    return found + 2.0 * weights + self.INDEXER_HEADS * (H + 1) * W


_Scores = Literal[RouterScores, 'root_softplus']


class DeepSeekV4(
  HyperConnections,
  WindowKeys,
  AttentionSinkLogits,
  PartialPositions,
  LocalPositions,
  GatedExperts,
  LLaMA,
  subject='Experts by token ids (DeepSeek-V4)',
):
  """DeepSeek-V4: experts in each block, in the first ones those of a table of token ids.

  DIMS_PER_HEAD is the whole of a head, and ROPE_FRACTION the share at its end that is rotated.
  """

  NUM_HASH_BLOCKS: Shape[NotNegativeInt] = 3  # first blocks that choose experts by token id
  # The argument of the activation is at most this, and its factor within ± this.
  SWIGLU_LIMIT: Function[Positive] = 10.0  # bound on the inputs of a gated activation

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

  NUM_SHARED_EXPERTS = 1
  ROUTER: Router = 'balanced'
  ROUTER_SCORES: _Scores = 'root_softplus'  # type: ignore[assignment]
  EXPERT_WEIGHT_SCALE = 1.5
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
          f'{name}={getattr(self, name)} is not supported for {type(self).__name__}: it must be '
          f'{value}'
        )
    if self.NUM_HASH_BLOCKS and self.NUM_EXPERTS > 256 and self.FROZEN_DTYPE != 'float32':
      raise UserError(
        f'FROZEN_DTYPE={self.FROZEN_DTYPE} cannot hold the numbers of NUM_EXPERTS='
        f'{self.NUM_EXPERTS} experts of token ids: FROZEN_DTYPE=float32'
      )

  def decoder(self) -> fdl.Config:
    lm = super().decoder()
    if self.NUM_HASH_BLOCKS:
      fdl.update_callable(lm, TokenIdLm)
    return lm

  def block_of(self, kind: BlockKind) -> fdl.Partial:
    block = super().block_of(kind)
    if kind.variant == 'by_ids':
      fdl.update_callable(block, TokenHyperBlock)
      block.ffn_tpl.experts_tpl.router_tpl = template(
        HashRouter, top_k=self.NUM_EXPERTS_PER_TOKEN, normalized=self.NORMALIZE_EXPERT_WEIGHTS,
        vocab_size=self.VOCAB_SIZE, scale=self.EXPERT_WEIGHT_SCALE,
      )  # fmt: skip
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
