"""ERNIE 4.5, without a dataset."""

from paxlite.experiments.llama import LLaMA
from paxlite.experiments.registry import register


class Ernie4_5(LLaMA):
  """ERNIE 4.5: LLaMA's block; Hugging Face's files have the order of rotary pairs that Pax has."""

  VOCAB_SIZE = 103_424
  DIMS_PER_HEAD = 128
  HEADS_SPAN_MODEL = False
  ROPE_THETA = 500_000.0


@register
class Ernie4_5_0_3B(Ernie4_5):
  """360,748,032 parameters: ERNIE-4.5-0.3B, with tied embedding."""

  NUM_LAYERS = 18
  NUM_HEADS = 16
  NUM_KV_HEADS = 2
  MODEL_DIMS = 1024
  HIDDEN_DIMS = 3072
  SEPARATE_EMBEDDING = False
  PERCORE_BATCH_SIZE = 4
