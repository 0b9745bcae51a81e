"""Gemma 1, 2 and 3, without a dataset."""

from typing import Literal

from paxlite.config.attribute_kinds import Count, Function
from paxlite.experiments.llama import LLaMA
from paxlite.experiments.parts.attention import AttentionKind, QkNorm
from paxlite.experiments.parts.embedding_factors import EmbeddingFactors
from paxlite.experiments.parts.local_positions import LocalPositions
from paxlite.experiments.parts.positions import RopeScaling
from paxlite.experiments.published_models import define


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


__getattr__ = define(globals())  # the published sizes: models.json
