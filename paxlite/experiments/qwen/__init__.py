"""Qwen2, Qwen2.5, Qwen3 and Qwen3's mixtures of experts, without a dataset."""

from paxlite.experiments.llama import LLaMA
from paxlite.experiments.parts.attention import QkNorm
from paxlite.experiments.parts.experts import GatedExperts
from paxlite.experiments.published_models import define


class Qwen2(LLaMA):
  """The architecture of Qwen2 and Qwen2.5: LLaMA's, with biases of queries, keys and values."""

  VOCAB_SIZE = 151_936
  ROPE_THETA = 1e6
  ROPE_LAYOUT = 'half'
  LAYERNORM_EPSILON = 1e-6
  USE_QKV_BIAS = True


class Qwen3(LLaMA):
  """The architecture of Qwen3: LLaMA's, with norms of queries and keys within each head."""

  VOCAB_SIZE = 151_936
  DIMS_PER_HEAD = 128
  HEADS_SPAN_MODEL = False
  ROPE_THETA = 1e6
  ROPE_LAYOUT = 'half'
  LAYERNORM_EPSILON = 1e-6
  QK_NORM: QkNorm = 'per_head'


class Qwen3Moe(GatedExperts, Qwen3):
  """The architecture of Qwen3's mixtures of experts: every block has gated experts."""

  NUM_EXPERTS = 128
  NUM_EXPERTS_PER_TOKEN = 8


__getattr__ = define(globals())  # the published sizes: models.json
