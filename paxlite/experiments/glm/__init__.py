"""GLM-4 and GLM-4.5, without a dataset."""

from typing import Literal

from paxlite.experiments.llama import LLaMA
from paxlite.experiments.parts.attention import QkNorm
from paxlite.experiments.parts.experts import GatedExperts, Router
from paxlite.experiments.parts.partial_positions import PartialPositions
from paxlite.experiments.parts.prediction import MultiTokenPrediction
from paxlite.experiments.registry import register


class GLM4(PartialPositions, LLaMA):
  """GLM-4-0414: norms before and after sublayers, and rotary positions in half of a head."""

  VOCAB_SIZE = 151_552
  DIMS_PER_HEAD = 128
  HEADS_SPAN_MODEL = False
  ROPE_FRACTION = 0.5
  NORM_POLICY: Literal['pre', 'post', 'primer_hybrid'] = 'primer_hybrid'


class GLM4Moe(MultiTokenPrediction, PartialPositions, GatedExperts, LLaMA):
  """GLM-4.5: a router that is balanced by a bias, and rotary positions in half of a head."""

  VOCAB_SIZE = 151_552
  DIMS_PER_HEAD = 128
  HEADS_SPAN_MODEL = False
  ROPE_THETA = 1e6
  ROPE_LAYOUT = 'half'
  ROPE_FRACTION = 0.5
  USE_QKV_BIAS = True

  NUM_DENSE_BLOCKS = 1
  ROUTER: Router = 'balanced'
  NUM_EXPERTS_PER_TOKEN = 8
  NUM_SHARED_EXPERTS = 1
  AUX_LOSS_COEF = 0.0001


@register
class GLM4_9B(GLM4):
  """9,400,279,040 parameters: GLM-4-9B-0414, with biases of queries, keys and values."""

  NUM_LAYERS = 40
  NUM_HEADS = 32
  NUM_KV_HEADS = 2
  MODEL_DIMS = 4096
  HIDDEN_DIMS = 13696
  USE_QKV_BIAS = True
  ICI_MESH_SHAPE = [1, 8, 1]


@register
class GLM4_5_Air(GLM4Moe):
  """106,852,251,264 parameters: GLM-4.5-Air; a token uses 12 billion of them."""

  NUM_LAYERS = 46
  NUM_HEADS = 96
  NUM_KV_HEADS = 8
  MODEL_DIMS = 4096
  HIDDEN_DIMS = 10944
  EXPERT_HIDDEN_DIMS = 1408
  NUM_EXPERTS = 128
  ICI_MESH_SHAPE = [1, 8, 1]
  DCN_MESH_SHAPE = [1, 8, 1]


@register
class GLM4_5_355B(GLM4Moe):
  """352,797,829,024 parameters: GLM-4.5; a token uses 32 billion of them."""

  NUM_LAYERS = 92
  NUM_HEADS = 96
  NUM_KV_HEADS = 8
  MODEL_DIMS = 5120
  HIDDEN_DIMS = 12288
  EXPERT_HIDDEN_DIMS = 1536
  NUM_EXPERTS = 160
  NUM_DENSE_BLOCKS = 3
  EXPERT_WEIGHT_SCALE = 2.5
  QK_NORM: QkNorm = 'per_head'
  ICI_MESH_SHAPE = [1, 8, 1]
  DCN_MESH_SHAPE = [1, 32, 1]
