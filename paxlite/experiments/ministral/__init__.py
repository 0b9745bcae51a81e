"""Ministral 3, without a dataset."""

from paxlite.experiments.llama import LLaMA
from paxlite.experiments.parts.attention_temperature import AttentionTemperature
from paxlite.experiments.parts.positions import RopeScaling
from paxlite.experiments.registry import register


class Ministral3(AttentionTemperature, LLaMA):
  """Ministral 3: Mistral with YaRN, and queries that grow with the logarithm of their positions."""

  VOCAB_SIZE = 131_072
  DIMS_PER_HEAD = 128
  HEADS_SPAN_MODEL = False
  ROPE_THETA = 1e6
  ROPE_LAYOUT = 'half'
  ROPE_SCALING: RopeScaling = 'yarn'
  ROPE_FACTOR = 16.0
  ROPE_ORIGINAL_LENGTH = 16_384
  ROPE_ATTENTION_FACTOR = 1.0
  ATTENTION_TEMPERATURE_SCALE = 0.1


@register
class Ministral3_8B(Ministral3):
  """8,489,553,920 parameters: the text model of Ministral-3-8B-2512."""

  NUM_LAYERS = 34
  NUM_HEADS = 32
  NUM_KV_HEADS = 8
  MODEL_DIMS = 4096
  HIDDEN_DIMS = 14336
  ICI_MESH_SHAPE = [1, 8, 1]
