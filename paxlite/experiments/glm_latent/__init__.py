"""Sparse attention whose indexers choose keys for several blocks, as in later models of GLM-5."""

from typing import Literal

import fiddle as fdl

from paxlite.config.attribute_kinds import Shape
from paxlite.core.errors import UserError
from paxlite.experiments.deepseek import DeepSeekV3
from paxlite.experiments.deepseek_sparse import DeepSeekV3_2
from paxlite.experiments.glm_latent.layers import IndexSharedAttention, IndexSourceAttention
from paxlite.experiments.parts.linked_stack import LinkedStack
from paxlite.experiments.parts.stack import BlockKind
from paxlite.experiments.registry import register
from paxlite.layers.linked_block import LinkedBlock


class SharedIndexers(LinkedStack, DeepSeekV3_2):  # type: ignore[override]
  """DeepSeek-V3.2 in which a block may have the keys that the last indexer before it has chosen."""

  INDEXER_TYPES: Shape[
    list[Literal['full', 'shared']]
  ] = []  # for each block, its own indexer or an earlier block's; []: all own

  @property
  def links(self) -> str:
    if 'shared' not in self.INDEXER_TYPES:
      return ''
    return f"INDEXER_TYPES with {self.INDEXER_TYPES.count('shared')} × 'shared'"

  @property
  def key_sources(self) -> list[int | None]:
    last, found = 0, []
    for i in range(self.NUM_LAYERS):
      if self.INDEXER_TYPES[i] == 'full':
        last = i
      found.append(None if last == i else last)
    return found

  @property
  def prediction_kind(self) -> BlockKind:
    return super().prediction_kind._replace(number=None)  # it has an indexer

  def has_indexer(self, kind: BlockKind) -> bool:
    return kind.number is None or self.INDEXER_TYPES[kind.number] == 'full'

  def validate(self) -> None:
    super().validate()
    types = self.INDEXER_TYPES
    if not types:
      return
    if len(types) != self.NUM_LAYERS or types[0] != 'full':
      raise UserError(
        f"INDEXER_TYPES must begin with 'full' and have NUM_LAYERS={self.NUM_LAYERS} items, not "
        f'{len(types)} from {types[0]!r} on'
      )

  def block_of(self, kind: BlockKind) -> fdl.Partial:
    block = super().block_of(kind)
    if kind.number is None:
      return block
    fdl.update_callable(block, LinkedBlock)
    fdl.update_callable(block.attention_tpl, IndexSourceAttention)
    if not self.has_indexer(kind):
      fdl.update_callable(block.attention_tpl, IndexSharedAttention)
      block.attention_tpl.selection_tpl = None
    return block


class GLM4MoeLite(DeepSeekV3):
  """GLM-4.7-Flash: latent attention of wide heads, whose positions are not stretched."""

  VOCAB_SIZE = 154_880
  DIMS_PER_HEAD = 192
  VALUE_DIMS_PER_HEAD = 256
  QUERY_LATENT_DIMS = 768
  LAYERNORM_EPSILON = 1e-5
  ROPE_THETA = 1e6
  ROPE_FACTOR = 1.0
  NUM_EXPERT_GROUPS = 1
  NUM_EXPERT_GROUPS_PER_TOKEN = 1
  EXPERT_WEIGHT_SCALE = 1.8


class GLM5(SharedIndexers):
  """GLM-5: sparse latent attention, with another layout of the indexer's rotary pairs."""

  VOCAB_SIZE = 154_880
  DIMS_PER_HEAD = 192
  VALUE_DIMS_PER_HEAD = 256
  QUERY_LATENT_DIMS = 2048
  LAYERNORM_EPSILON = 1e-5
  ROPE_THETA = 1e6
  ROPE_FACTOR = 1.0
  NUM_EXPERT_GROUPS = 1
  NUM_EXPERT_GROUPS_PER_TOKEN = 1
  INDEXER_HEADS = 32
  INDEXER_ROPE_LAYOUT: Literal['interleaved', 'half'] = 'interleaved'


@register
class GLM4_7_Flash(GLM4MoeLite):
  """29,943,393,920 parameters: GLM-4.7-Flash; a token uses 3.9 billion of them."""

  NUM_LAYERS = 47
  NUM_HEADS = 20
  MODEL_DIMS = 2048
  HIDDEN_DIMS = 10240
  MAX_SEQ_LEN = 8192
  NUM_EXPERTS = 64
  NUM_EXPERTS_PER_TOKEN = 4
  EXPERT_HIDDEN_DIMS = 1536

  ICI_MESH_SHAPE = [1, 8, 1]


@register
class GLM5_744B(GLM5):
  """743,911,218,432 parameters: GLM-5; a token uses 40 billion of them."""

  NUM_LAYERS = 78
  NUM_HEADS = 64
  MODEL_DIMS = 6144
  HIDDEN_DIMS = 12288
  MAX_SEQ_LEN = 4096
  NUM_DENSE_BLOCKS = 3
  NUM_EXPERTS = 256
  NUM_EXPERTS_PER_TOKEN = 8
  EXPERT_HIDDEN_DIMS = 2048

  ICI_MESH_SHAPE = [1, 8, 1]
  DCN_MESH_SHAPE = [1, 64, 1]
