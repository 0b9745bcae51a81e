"""DeepSeek-V3.2: DeepSeek-V3 with sparse attention, whose keys an indexer chooses."""

import dataclasses
from collections.abc import Iterable
from typing import Any, Literal

import fiddle as fdl
import jax
from fiddle import selectors

from paxlite.config.attribute_kinds import Function
from paxlite.config.templates import template
from paxlite.core.errors import UserError
from paxlite.experiments.deepseek import DeepSeekV3
from paxlite.experiments.deepseek_sparse.layers import SparseIndexer
from paxlite.experiments.parts.attention import AttentionKind
from paxlite.experiments.parts.latent_queries import Indexers
from paxlite.experiments.parts.stack import BlockKind
from paxlite.experiments.registry import register
from paxlite.layers.attention.attention_case import Case
from paxlite.layers.norms import LayerNorm
from paxlite.layers.projection import Projection


class DeepSeekV3_2(Indexers, DeepSeekV3, subject='Sparse attention (DeepSeek-V3.2)'):
  """DeepSeek-V3.2: each query sees the keys that an indexer scores highest; see Indexers."""

  INDEXER_ROPE_LAYOUT: Function[Literal['interleaved', 'half']] = (
    'half'  # dimension pairs of the indexer's RoPE: adjacent, or across halves
  )

  def has_indexer(self, kind: BlockKind) -> bool:
    """Returns whether attention of a block has an indexer of its own."""
    return True

  def validate(self) -> None:
    super().validate()
    if self.INDEXER_DIMS_PER_HEAD < self.ROTARY_DIMS_PER_HEAD:
      raise UserError(
        f'INDEXER_DIMS_PER_HEAD={self.INDEXER_DIMS_PER_HEAD} must be at least '
        f'ROTARY_DIMS_PER_HEAD={self.ROTARY_DIMS_PER_HEAD}, of which all are rotated'
      )

  def attention(self) -> fdl.Partial:
    attention, rotary = super().attention(), self.rotary()
    rotary.layout = self.INDEXER_ROPE_LAYOUT
    attention.selection_tpl = template(
      SparseIndexer, model_dims=self.MODEL_DIMS, query_latent_dims=self.QUERY_LATENT_DIMS,
      num_heads=self.INDEXER_HEADS, head_dim=self.INDEXER_DIMS_PER_HEAD,
      rotary_dims=self.ROTARY_DIMS_PER_HEAD, top_k=self.INDEXER_TOP_K,
      norm_tpl=template(LayerNorm, epsilon=1e-6, offset=0.0, dtype=self.FPROP_DTYPE),
      rotary_tpl=rotary,
    )  # fmt: skip
    return attention

  def without_factors(self, layer: fdl.Buildable) -> Iterable[fdl.Buildable]:
    """Returns the projections of the indexer too, whose choice has no gradient."""
    yield from super().without_factors(layer)
    for indexer in selectors.select(layer, SparseIndexer, check_nonempty=False):
      yield from selectors.select(indexer, Projection)

  def attention_case(self, window: int = 0, platform: str = 'cpu', capability: float = 0.0) -> Case:
    case, T = super().attention_case(window, platform, capability), self.MAX_SEQ_LEN
    if T <= self.INDEXER_TOP_K:  # all keys are chosen
      return case
    bias: Any = jax.ShapeDtypeStruct((case.q.shape[0], 1, T, T), 'float32')
    return dataclasses.replace(case, bias=bias)

  def attention_flops_of(self, kind: AttentionKind | None) -> float:
    """Returns the same with the chosen keys alone, and with the indexer's forward pass."""
    keys = min(self.INDEXER_TOP_K, self.MAX_SEQ_LEN)
    chosen = 12.0 * self.attention_dims * (keys - keys**2 / (2 * self.MAX_SEQ_LEN))
    if self.MAX_SEQ_LEN <= self.INDEXER_TOP_K:
      return chosen
    N, H = self.INDEXER_HEADS, self.INDEXER_DIMS_PER_HEAD
    weights = self.QUERY_LATENT_DIMS * N * H + self.MODEL_DIMS * (N + H)
    return chosen + 2.0 * weights + N * (H + 1) * self.MAX_SEQ_LEN


@register
class DeepSeekV3_2_671B(DeepSeekV3_2):
  """671,877,944,064 parameters: DeepSeek-V3.2, without its NUM_PREDICTION_MODULES=1."""

  NUM_LAYERS = 61
  NUM_HEADS = 128
  MODEL_DIMS = 7168
  HIDDEN_DIMS = 18432
  VOCAB_SIZE = 129_280
  MAX_SEQ_LEN = 4096
  NUM_DENSE_BLOCKS = 3
  NUM_EXPERTS = 256
  NUM_EXPERTS_PER_TOKEN = 8
  EXPERT_HIDDEN_DIMS = 2048

  ICI_MESH_SHAPE = [1, 8, 1]
  DCN_MESH_SHAPE = [1, 64, 1]
