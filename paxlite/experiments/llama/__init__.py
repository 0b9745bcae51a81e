"""LLaMA, Llama 3, Mistral and SmolLM, without a dataset.

The sizes are those of published weights, which `paxlite import` reads.
"""

from paxlite.experiments.language_model import LanguageModel
from paxlite.experiments.parts.attention import AttentionKind
from paxlite.experiments.parts.optimization import Schedule
from paxlite.experiments.parts.stack import Activation
from paxlite.experiments.parts.width_and_norms import Norm
from paxlite.experiments.published_models import define


class LLaMA(LanguageModel):
  """LLaMA and Mistral: RMSNorm, rotary positions, SiLU-gated feed-forward layers, no biases.

  The training values are Rosetta Pax's for fine-tuning: AdamW, learning rate 1e-6, cosine decay.
  """

  _is_published = True

  MAX_SEQ_LEN = 4096
  VOCAB_SIZE = 32000
  START_ID: int | None = None

  PACKED_INPUT = True
  USE_REPEATED_LAYER = True
  SEPARATE_EMBEDDING = True
  USE_ROTARY_POSITION_EMB = True
  ACTIVATION_CLS: Activation = 'silu'
  USE_GATED_ACTIVATION = True
  NORM_CLS: Norm = 'RmsNorm'
  LAYERNORM_EPSILON = 1e-5
  SOFTMAX_CAP_LOGITS = -1.0
  ATTEN_LOGIT_CAP = -1.0
  WEIGHT_INIT = 'xavier_uniform'

  LEARNING_RATE = 1e-6
  ADAM_BETA1 = 0.9
  ADAM_BETA2 = 0.95
  ADAM_EPSILON = 1e-8
  ADAM_CLIP_THRESHOLD = -1.0
  CLIP_GRADIENT_NORM_TO_VALUE = 1.0
  WEIGHT_DECAY = 0.1
  LR_SCHEDULE: Schedule = 'linear_rampup_cosine_decay'
  LR_COS_WARMUP = 500
  LR_COS_DECAY_END = 1000
  MAX_STEPS = 1000


class LLaMA7B(LLaMA):
  """6,738,415,616 parameters: LLaMA 7B and Llama 2 7B."""

  NUM_LAYERS = 32
  NUM_HEADS = 32
  MODEL_DIMS = 4096
  HIDDEN_DIMS = 11008

  ICI_MESH_SHAPE = [1, 8, 1]
  PERCORE_BATCH_SIZE = 16


class LLaMA13B(LLaMA):
  """13,015,864,320 parameters: LLaMA 13B and Llama 2 13B."""

  NUM_LAYERS = 40
  NUM_HEADS = 40
  MODEL_DIMS = 5120
  HIDDEN_DIMS = 13824

  ICI_MESH_SHAPE = [1, 8, 1]
  PERCORE_BATCH_SIZE = 8


class LLaMA70B(LLaMA):
  """68,976,648,192 parameters: Llama 2 70B, with 8 key-value heads."""

  NUM_LAYERS = 80
  NUM_HEADS = 64
  NUM_KV_HEADS = 8
  MODEL_DIMS = 8192
  HIDDEN_DIMS = 28672

  ICI_MESH_SHAPE = [1, 8, 1]
  DCN_MESH_SHAPE = [1, 2, 1]
  PERCORE_BATCH_SIZE = 4


class SmolLM3(LLaMA):
  """SmolLM3: LLaMA, with a block without rotary positions after every three."""

  ROPE_LAYOUT = 'half'
  LAYERNORM_EPSILON = 1e-6
  ATTENTION_PATTERN: list[AttentionKind] = ['full', 'full', 'full', 'full_nope']


__getattr__ = define(globals())  # the published sizes: models.json
