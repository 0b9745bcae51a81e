"""LLaMA, Llama 3, Mistral and SmolLM, without a dataset.

The sizes are those of published weights, which `paxlite import` reads.
"""

from paxlite.experiments.language_model import LanguageModel
from paxlite.experiments.parts.attention import AttentionKind
from paxlite.experiments.parts.optimization import Schedule
from paxlite.experiments.parts.stack import Activation
from paxlite.experiments.parts.width_and_norms import Norm
from paxlite.experiments.registry import register


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


@register
class LLaMA3_8B(LLaMA):
  """8,030,261,248 parameters: Meta-Llama-3-8B."""

  NUM_LAYERS = 32
  NUM_HEADS = 32
  NUM_KV_HEADS = 8
  MODEL_DIMS = 4096
  HIDDEN_DIMS = 14336
  VOCAB_SIZE = 128_256
  MAX_SEQ_LEN = 8192
  ROPE_THETA = 500_000.0

  ICI_MESH_SHAPE = [1, 8, 1]
  PERCORE_BATCH_SIZE = 2


@register
class LLaMA3_1_8B(LLaMA3_8B):
  """Llama-3.1-8B: Llama 3 whose rotary positions are stretched by 8, for up to 131,072 tokens."""

  ROPE_FACTOR = 8.0


@register
class LLaMA3_2_1B(LLaMA):
  """1,235,814,400 parameters: Llama-3.2-1B, tied embedding, rotary positions stretched by 32."""

  NUM_LAYERS = 16
  NUM_HEADS = 32
  NUM_KV_HEADS = 8
  MODEL_DIMS = 2048
  HIDDEN_DIMS = 8192
  VOCAB_SIZE = 128_256
  SEPARATE_EMBEDDING = False
  ROPE_THETA = 500_000.0
  ROPE_FACTOR = 32.0

  ICI_MESH_SHAPE = [1, 8, 1]
  PERCORE_BATCH_SIZE = 4


@register
class Mistral7B(LLaMA):
  """7,241,732,096 parameters: Mistral-7B-v0.1 with its sliding window of 4096 tokens."""

  NUM_LAYERS = 32
  NUM_HEADS = 32
  NUM_KV_HEADS = 8
  MODEL_DIMS = 4096
  HIDDEN_DIMS = 14336
  MAX_SEQ_LEN = 8192
  SLIDING_WINDOW = 4096

  ICI_MESH_SHAPE = [1, 8, 1]
  PERCORE_BATCH_SIZE = 2


@register
class SmolLM135M(LLaMA):
  """134,515,008 parameters: SmolLM2-135M, tied embedding, 3 key-value heads, for one device."""

  NUM_LAYERS = 30
  NUM_HEADS = 9
  NUM_KV_HEADS = 3
  MODEL_DIMS = 576
  HIDDEN_DIMS = 1536
  VOCAB_SIZE = 49_152
  MAX_SEQ_LEN = 2048
  SEPARATE_EMBEDDING = False
  ROPE_THETA = 100_000.0

  PERCORE_BATCH_SIZE = 4


@register
class LLaMA3_1_70B(LLaMA3_1_8B):
  """70,553,706,496 parameters: Llama-3.1-70B and Llama-3.3-70B."""

  NUM_LAYERS = 80
  NUM_HEADS = 64
  NUM_KV_HEADS = 8
  MODEL_DIMS = 8192
  HIDDEN_DIMS = 28672
  ICI_MESH_SHAPE = [1, 8, 1]
  DCN_MESH_SHAPE = [1, 2, 1]
  PERCORE_BATCH_SIZE = 1


@register
class LLaMA3_1_405B(LLaMA3_1_8B):
  """405,853,388,800 parameters: Llama-3.1-405B."""

  NUM_LAYERS = 126
  NUM_HEADS = 128
  NUM_KV_HEADS = 8
  MODEL_DIMS = 16384
  HIDDEN_DIMS = 53248
  ICI_MESH_SHAPE = [1, 8, 1]
  DCN_MESH_SHAPE = [1, 32, 1]
  PERCORE_BATCH_SIZE = 1


@register
class LLaMA3_2_3B(LLaMA3_2_1B):
  """3,212,749,824 parameters: Llama-3.2-3B."""

  NUM_LAYERS = 28
  NUM_HEADS = 24
  NUM_KV_HEADS = 8
  MODEL_DIMS = 3072
  HIDDEN_DIMS = 8192
  PERCORE_BATCH_SIZE = 2


@register
class Mistral7B_v0_2(Mistral7B):
  """7,241,732,096 parameters: Mistral-7B-v0.2, without a sliding window."""

  SLIDING_WINDOW = 0
  ROPE_THETA = 1000000.0


@register
class Mistral7B_v0_3(Mistral7B_v0_2):
  """7,248,023,552 parameters: Mistral-7B-v0.3, with a larger vocabulary."""

  VOCAB_SIZE = 32768


@register
class MistralNemo12B(LLaMA):
  """12,247,782,400 parameters: Mistral-Nemo-2407; its heads are narrower than the model."""

  NUM_LAYERS = 40
  NUM_HEADS = 32
  NUM_KV_HEADS = 8
  MODEL_DIMS = 5120
  HIDDEN_DIMS = 14336
  DIMS_PER_HEAD = 128
  HEADS_SPAN_MODEL = False
  VOCAB_SIZE = 131_072
  ROPE_THETA = 1000000.0
  ICI_MESH_SHAPE = [1, 8, 1]


@register
class MistralSmall22B(LLaMA):
  """22,247,282,688 parameters: Mistral-Small-2409."""

  NUM_LAYERS = 56
  NUM_HEADS = 48
  NUM_KV_HEADS = 8
  MODEL_DIMS = 6144
  HIDDEN_DIMS = 16384
  VOCAB_SIZE = 32768
  ROPE_THETA = 1000000.0
  ICI_MESH_SHAPE = [1, 8, 1]


@register
class MistralSmall24B(MistralNemo12B):
  """23,572,403,200 parameters: Mistral-Small-24B-2501."""

  HIDDEN_DIMS = 32768
  ROPE_THETA = 100000000.0


@register
class SmolLM3_3B(SmolLM3):
  """3,075,098,624 parameters: SmolLM3-3B, with tied embedding."""

  NUM_LAYERS = 36
  NUM_HEADS = 16
  NUM_KV_HEADS = 4
  MODEL_DIMS = 2048
  HIDDEN_DIMS = 11008
  VOCAB_SIZE = 128_256
  ROPE_THETA = 5000000.0
  SEPARATE_EMBEDDING = False
  ICI_MESH_SHAPE = [1, 8, 1]
