"""Phi-3 and Phi-4, without a dataset."""

from paxlite.experiments.llama import LLaMA
from paxlite.experiments.registry import register
from paxlite.experiments.rotary_positions import RopeScaling


class Phi3(LLaMA):
  """Phi-3 and Phi-4: LLaMA's block, whose published weights are packed."""

  VOCAB_SIZE = 32064
  ROPE_LAYOUT = 'half'
  ROPE_SCALING: RopeScaling = 'longrope'
  ROPE_ORIGINAL_LENGTH = 4096


@register
class Phi3_Mini(Phi3):
  """3,821,079,552 parameters: Phi-3-mini-4k, with a sliding window of 2047 tokens."""

  NUM_LAYERS = 32
  NUM_HEADS = 32
  MODEL_DIMS = 3072
  HIDDEN_DIMS = 8192
  SLIDING_WINDOW = 2047
  ICI_MESH_SHAPE = [1, 8, 1]


@register
class Phi3_Medium(Phi3):
  """13,960,238,080 parameters: Phi-3-medium-4k, with a sliding window of 2047 tokens."""

  NUM_LAYERS = 40
  NUM_HEADS = 40
  NUM_KV_HEADS = 10
  MODEL_DIMS = 5120
  HIDDEN_DIMS = 17920
  SLIDING_WINDOW = 2047
  ICI_MESH_SHAPE = [1, 8, 1]


@register
class Phi4(Phi3):
  """14,659,507,200 parameters: phi-4."""

  NUM_LAYERS = 40
  NUM_HEADS = 40
  NUM_KV_HEADS = 10
  MODEL_DIMS = 5120
  HIDDEN_DIMS = 17920
  VOCAB_SIZE = 100_352
  ROPE_THETA = 250_000.0
  ICI_MESH_SHAPE = [1, 8, 1]
