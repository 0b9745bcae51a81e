"""GLM-4.7-Flash and GLM-5: GLM with the attention and the experts of DeepSeek-V3 and V3.2."""

from typing import Literal

from paxlite.experiments.deepseek import DeepSeekV3
from paxlite.experiments.parts.shared_indexers import SharedIndexers
from paxlite.experiments.registry import register


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
