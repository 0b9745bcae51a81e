"""MiniMax-M2: experts by sigmoids, and norms of all queries and keys of a token."""

from paxlite.experiments.llama import LLaMA
from paxlite.experiments.parts.attention import QkNorm
from paxlite.experiments.parts.experts import GatedExperts, Router
from paxlite.experiments.parts.partial_positions import PartialPositions
from paxlite.experiments.registry import register


class MiniMaxM2(PartialPositions, GatedExperts, LLaMA):
  """MiniMax-M2: rotary positions in half of a head, and experts in every block."""

  VOCAB_SIZE = 200_064
  DIMS_PER_HEAD = 128
  HEADS_SPAN_MODEL = False
  LAYERNORM_EPSILON = 1e-6
  ROPE_THETA = 5e6
  ROPE_LAYOUT = 'half'
  ROPE_FRACTION = 0.5
  QK_NORM: QkNorm = 'all_heads'

  ROUTER: Router = 'balanced'
  NUM_EXPERTS_PER_TOKEN = 8


@register
class MiniMaxM2_230B(MiniMaxM2):
  """228,689,764,864 parameters: MiniMax-M2; a token uses 10 billion of them."""

  NUM_LAYERS = 62
  NUM_HEADS = 48
  NUM_KV_HEADS = 8
  MODEL_DIMS = 3072
  HIDDEN_DIMS = 1536
  NUM_EXPERTS = 256
  ICI_MESH_SHAPE = [1, 8, 1]
  DCN_MESH_SHAPE = [1, 16, 1]
