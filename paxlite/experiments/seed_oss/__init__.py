"""Seed-OSS, without a dataset."""

from paxlite.experiments.llama import LLaMA
from paxlite.experiments.registry import register


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


@register
class SeedOss36B(SeedOss):
  """36,151,104,512 parameters: Seed-OSS-36B."""

  NUM_LAYERS = 64
  NUM_HEADS = 80
  NUM_KV_HEADS = 8
  MODEL_DIMS = 5120
  HIDDEN_DIMS = 27648
  ICI_MESH_SHAPE = [1, 8, 1]
  DCN_MESH_SHAPE = [1, 2, 1]
