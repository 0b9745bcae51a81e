"""Seed-OSS, without a dataset."""

from paxlite.experiments.llama import LLaMA
from paxlite.experiments.published_models import define


class SeedOss(LLaMA):
  """Seed-OSS: LLaMA's block, with biases of queries, keys and values."""

  VOCAB_SIZE = 155_136
  DIMS_PER_HEAD = 128
  HEADS_SPAN_MODEL = False
  ROPE_THETA = 1e7
  ROPE_LAYOUT = 'half'
  LAYERNORM_EPSILON = 1e-6
  USE_QKV_BIAS = True
  USE_FFN_BIAS = False


__getattr__ = define(globals())  # the published sizes: models.json
