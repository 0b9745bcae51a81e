"""EXAONE 4, without a dataset."""

from typing import Literal

from paxlite.experiments.llama import LLaMA
from paxlite.experiments.parts.attention import AttentionKind, QkNorm
from paxlite.experiments.registry import register


class Exaone4(LLaMA):
  """EXAONE 4: norms after sublayers, and full attention without rotary positions in one of four."""

  VOCAB_SIZE = 102_400
  ROPE_THETA = 1e6
  ROPE_LAYOUT = 'half'
  ROPE_FACTOR = 16.0
  NORM_POLICY: Literal['pre', 'post', 'primer_hybrid'] = 'post'
  QK_NORM: QkNorm = 'per_head'
  SLIDING_WINDOW = 4096
  ATTENTION_PATTERN: list[AttentionKind] = ['sliding', 'sliding', 'sliding', 'full_nope']


@register
class Exaone4_32B(Exaone4):
  """32,003,216,384 parameters: EXAONE-4.0-32B."""

  NUM_LAYERS = 64
  NUM_HEADS = 40
  NUM_KV_HEADS = 8
  MODEL_DIMS = 5120
  HIDDEN_DIMS = 27392
  ICI_MESH_SHAPE = [1, 8, 1]
  DCN_MESH_SHAPE = [1, 2, 1]


@register
class Exaone4_1_2B(Exaone4):
  """1,279,391,488 parameters: EXAONE-4.0-1.2B, with full attention and tied embedding."""

  NUM_LAYERS = 30
  NUM_HEADS = 32
  NUM_KV_HEADS = 8
  MODEL_DIMS = 2048
  HIDDEN_DIMS = 4096
  SEPARATE_EMBEDDING = False
  SLIDING_WINDOW = 0
  ATTENTION_PATTERN: list[AttentionKind] = []
  PERCORE_BATCH_SIZE = 2
