"""Gemma 1, 2 and 3, without a dataset."""

from typing import Literal

from paxlite.config.attribute_kinds import Count, Function
from paxlite.experiments.llama import LLaMA
from paxlite.experiments.parts.attention import AttentionKind, QkNorm
from paxlite.experiments.parts.embedding_factors import EmbeddingFactors
from paxlite.experiments.parts.local_positions import LocalPositions
from paxlite.experiments.parts.positions import RopeScaling
from paxlite.experiments.registry import register


class Gemma(EmbeddingFactors, LLaMA):
  """Gemma 1: LLaMA's block with GELU, norms around 1, and a tied, scaled embedding."""

  VOCAB_SIZE = 256_128
  MAX_SEQ_LEN = 8192
  DIMS_PER_HEAD = 256
  HEADS_SPAN_MODEL = False

  SEPARATE_EMBEDDING = False
  SCALE_EMBEDDING = True
  ACTIVATION_CLS = 'gelu'
  NORM_SCALE_OFFSET = 1.0
  LAYERNORM_EPSILON = 1e-6


class Gemma2(Gemma, subject='Attention'):
  """Gemma 2: norms before and after sublayers, capped logits, sliding attention in turns."""

  VOCAB_SIZE = 256_000
  ROPE_LAYOUT = 'half'
  NORM_POLICY: Literal['pre', 'post', 'primer_hybrid'] = 'primer_hybrid'
  ATTEN_LOGIT_CAP = 50.0
  SOFTMAX_CAP_LOGITS = 30.0
  SLIDING_WINDOW = 4096
  ATTENTION_PATTERN: list[AttentionKind] = ['sliding', 'full']

  QUERY_PRE_ATTN_SCALAR: Function[Count] = 256  # attention scores are divided by its square root

  @property
  def attention_scale(self) -> float:
    return self.QUERY_PRE_ATTN_SCALAR**-0.5


class Gemma3(LocalPositions, Gemma2):
  """Gemma 3's text model: norms of queries and keys, sliding attention in five of six blocks."""

  VOCAB_SIZE = 262_208
  ROPE_THETA = 1e6
  ROPE_LOCAL_THETA = 10_000.0
  ROPE_SCALING: RopeScaling = 'linear'
  ROPE_STRETCHES_LOCAL = False
  QK_NORM: QkNorm = 'per_head'
  ATTEN_LOGIT_CAP = -1.0
  SOFTMAX_CAP_LOGITS = -1.0
  SLIDING_WINDOW = 1024
  ATTENTION_PATTERN: list[AttentionKind] = [
    'sliding', 'sliding', 'sliding', 'sliding', 'sliding', 'full',
  ]  # fmt: skip


@register
class Gemma2B(Gemma):
  """2,506,434,560 parameters, one key-value head.

  The vocabulary has 256,128 rows, as Google's files. Those of Hugging Face have 256,000, and
  weights that are imported from them set VOCAB_SIZE to that.
  """

  NUM_LAYERS = 18
  NUM_HEADS = 8
  NUM_KV_HEADS = 1
  MODEL_DIMS = 2048
  HIDDEN_DIMS = 16384

  ICI_MESH_SHAPE = [1, 8, 1]
  PERCORE_BATCH_SIZE = 2


@register
class Gemma7B(Gemma):
  """8,538,074,112 parameters; its 16 heads of 256 dimensions are wider than the model's 3072."""

  NUM_LAYERS = 28
  NUM_HEADS = 16
  MODEL_DIMS = 3072
  HIDDEN_DIMS = 24576

  ICI_MESH_SHAPE = [1, 8, 1]
  PERCORE_BATCH_SIZE = 1


@register
class Gemma2_2B(Gemma2):
  """2,614,341,888 parameters: gemma-2-2b."""

  NUM_LAYERS = 26
  NUM_HEADS = 8
  NUM_KV_HEADS = 4
  MODEL_DIMS = 2304
  HIDDEN_DIMS = 9216
  ICI_MESH_SHAPE = [1, 8, 1]


@register
class Gemma2_9B(Gemma2):
  """9,241,705,984 parameters: gemma-2-9b."""

  NUM_LAYERS = 42
  NUM_HEADS = 16
  NUM_KV_HEADS = 8
  MODEL_DIMS = 3584
  HIDDEN_DIMS = 14336
  ICI_MESH_SHAPE = [1, 8, 1]


@register
class Gemma2_27B(Gemma2):
  """27,227,128,320 parameters: gemma-2-27b."""

  NUM_LAYERS = 46
  NUM_HEADS = 32
  NUM_KV_HEADS = 16
  MODEL_DIMS = 4608
  HIDDEN_DIMS = 36864
  DIMS_PER_HEAD = 128
  QUERY_PRE_ATTN_SCALAR = 144
  ICI_MESH_SHAPE = [1, 8, 1]
  DCN_MESH_SHAPE = [1, 2, 1]


@register
class Gemma3_270M(Gemma3):
  """268,098,176 parameters: gemma-3-270m."""

  NUM_LAYERS = 18
  NUM_HEADS = 4
  NUM_KV_HEADS = 1
  MODEL_DIMS = 640
  HIDDEN_DIMS = 2048
  VOCAB_SIZE = 262_144
  SLIDING_WINDOW = 512
  PERCORE_BATCH_SIZE = 4


@register
class Gemma3_1B(Gemma3):
  """999,885,952 parameters: gemma-3-1b."""

  NUM_LAYERS = 26
  NUM_HEADS = 4
  NUM_KV_HEADS = 1
  MODEL_DIMS = 1152
  HIDDEN_DIMS = 6912
  VOCAB_SIZE = 262_144
  SLIDING_WINDOW = 512
  PERCORE_BATCH_SIZE = 2


@register
class Gemma3_4B(Gemma3):
  """3,880,263,168 parameters: the text model of gemma-3-4b."""

  NUM_LAYERS = 34
  NUM_HEADS = 8
  NUM_KV_HEADS = 4
  MODEL_DIMS = 2560
  HIDDEN_DIMS = 10240
  ROPE_FACTOR = 8.0
  ICI_MESH_SHAPE = [1, 8, 1]


@register
class Gemma3_12B(Gemma3):
  """11,766,034,176 parameters: the text model of gemma-3-12b."""

  NUM_LAYERS = 48
  NUM_HEADS = 16
  NUM_KV_HEADS = 8
  MODEL_DIMS = 3840
  HIDDEN_DIMS = 15360
  ROPE_FACTOR = 8.0
  ICI_MESH_SHAPE = [1, 8, 1]


@register
class Gemma3_27B(Gemma3):
  """27,009,346,304 parameters: the text model of gemma-3-27b."""

  NUM_LAYERS = 62
  NUM_HEADS = 32
  NUM_KV_HEADS = 16
  MODEL_DIMS = 5376
  HIDDEN_DIMS = 21504
  DIMS_PER_HEAD = 128
  QUERY_PRE_ATTN_SCALAR = 168
  ROPE_FACTOR = 8.0
  ICI_MESH_SHAPE = [1, 8, 1]
  DCN_MESH_SHAPE = [1, 2, 1]
