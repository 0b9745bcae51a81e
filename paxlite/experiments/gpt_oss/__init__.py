"""gpt-oss: attention sinks, sliding attention in turns, experts with biases; no dataset."""

from paxlite.experiments.llama import LLaMA
from paxlite.experiments.parts.attention import AttentionKind
from paxlite.experiments.parts.attention_sinks import AttentionSinkLogits
from paxlite.experiments.parts.experts import GatedExperts
from paxlite.experiments.parts.positions import RopeScaling
from paxlite.experiments.parts.stack import Activation
from paxlite.experiments.registry import register


class GptOss(AttentionSinkLogits, GatedExperts, LLaMA):
  """gpt-oss: attention sinks, sliding attention in turns, and experts with biases."""

  VOCAB_SIZE = 201_088
  DIMS_PER_HEAD = 64
  HEADS_SPAN_MODEL = False
  USE_BIAS = True
  USE_FFN_BIAS = False
  USE_ATTENTION_SINKS = True
  SLIDING_WINDOW = 128
  ATTENTION_PATTERN: list[AttentionKind] = ['sliding', 'full']
  ROPE_THETA = 150_000.0
  ROPE_LAYOUT = 'half'
  ROPE_SCALING: RopeScaling = 'yarn'
  ROPE_FACTOR = 32.0
  ROPE_ORIGINAL_LENGTH = 4096
  ROPE_WHOLE_PAIRS = False

  NUM_EXPERTS_PER_TOKEN = 4
  EXPERT_ACTIVATION_CLS: Activation = 'clamped_swiglu'
  USE_EXPERT_BIAS = True
  USE_ROUTER_BIAS = True


@register
class GptOss20B(GptOss):
  """20,914,757,184 parameters: gpt-oss-20b; a token uses 3.6 billion of them."""

  NUM_LAYERS = 24
  NUM_HEADS = 64
  NUM_KV_HEADS = 8
  MODEL_DIMS = 2880
  HIDDEN_DIMS = 2880
  NUM_EXPERTS = 32
  ICI_MESH_SHAPE = [1, 8, 1]
  DCN_MESH_SHAPE = [1, 2, 1]


@register
class GptOss120B(GptOss):
  """116,829,156,672 parameters: gpt-oss-120b; a token uses 5.1 billion of them."""

  NUM_LAYERS = 36
  NUM_HEADS = 64
  NUM_KV_HEADS = 8
  MODEL_DIMS = 2880
  HIDDEN_DIMS = 2880
  NUM_EXPERTS = 128
  ICI_MESH_SHAPE = [1, 8, 1]
  DCN_MESH_SHAPE = [1, 8, 1]
