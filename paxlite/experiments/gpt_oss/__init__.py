"""gpt-oss: attention sinks, sliding attention in turns, experts with biases; no dataset."""

from paxlite.experiments.llama import LLaMA
from paxlite.experiments.parts.attention import AttentionKind
from paxlite.experiments.parts.attention_sinks import AttentionSinkLogits
from paxlite.experiments.parts.experts import GatedExperts
from paxlite.experiments.parts.positions import RopeScaling
from paxlite.experiments.parts.stack import Activation
from paxlite.experiments.published_models import define


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


__getattr__ = define(globals())  # the published sizes: models.json
