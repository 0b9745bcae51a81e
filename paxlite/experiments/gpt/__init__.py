"""GPT-3-style models as in Rosetta Pax: GPT126M, GPT5B, GPT175B, without a dataset."""

from paxlite.experiments.language_model import LanguageModel
from paxlite.experiments.parts.optimization import Schedule
from paxlite.experiments.parts.stack import Activation
from paxlite.experiments.parts.width_and_norms import Norm
from paxlite.experiments.registry import register
from paxlite.layers.remat import PolicyChoice


@register
class GPT126M(LanguageModel):
  """125,262,336 parameters, tied embedding, learned positions, LayerNorm, GELU.

  Pax applies no checkpoint policy to unrolled layers, but paxlite applies one to every stack.
  Therefore this model sets SAVE_EVERYTHING, which has the same effect.
  """

  NUM_LAYERS = 12
  NUM_HEADS = 12
  MODEL_DIMS = 768
  VOCAB_SIZE = 50304
  MAX_SEQ_LEN = 2048

  ICI_MESH_SHAPE = [8, 1, 1]
  DCN_MESH_SHAPE = [8, 1, 1]
  PERCORE_BATCH_SIZE = 4
  MAX_STEPS = 600_000

  PACKED_INPUT = True
  USE_REPEATED_LAYER = False
  CHECKPOINT_POLICY: PolicyChoice = 'SAVE_EVERYTHING'
  TRAINABLE_POSITION_EMB = True
  USE_BIAS = True
  ACTIVATION_CLS: Activation = 'gelu'
  NORM_CLS: Norm = 'LayerNorm'
  LAYERNORM_EPSILON = 1e-5
  SOFTMAX_CAP_LOGITS = -1.0
  ATTEN_LOGIT_CAP = -1.0
  INIT_STD = 0.023

  LEARNING_RATE = 6e-4
  ADAM_BETA1 = 0.9
  ADAM_BETA2 = 0.95
  ADAM_EPSILON = 1e-8
  ADAM_CLIP_THRESHOLD = -1.0
  CLIP_GRADIENT_NORM_TO_VALUE = 1.0
  WEIGHT_DECAY = 0.1

  LR_SCHEDULE: Schedule = 'linear_rampup_cosine_decay'
  LR_COS_WARMUP = 636
  LR_COS_DECAY_END = 500_000


@register
class GPT5B(GPT126M):
  """5,047,558,144 parameters in repeated layers. With datasets: Synthetic5B, FlatTokens5B."""

  NUM_LAYERS = 24
  NUM_HEADS = 32
  MODEL_DIMS = 4096

  ICI_MESH_SHAPE = [1, 8, 1]
  DCN_MESH_SHAPE = [1, 32, 1]
  PERCORE_BATCH_SIZE = 8
  MAX_STEPS = 75_000
  CHECKPOINT_EVERY_N_STEPS = 250
  SUMMARY_INTERVAL_STEPS = 10

  USE_REPEATED_LAYER = True
  CHECKPOINT_POLICY = 'SAVE_DOT_WITH_NO_BATCH_DIM'
  EMBEDDING_DROPOUT_PROB = 0.1
  INIT_STD = 0.01

  LEARNING_RATE = 1.6e-4
  LR_COS_WARMUP = 115
  LR_COS_DECAY_END = 62_500


@register
class GPT175B(GPT126M):
  """174,604,259,328 parameters in repeated layers. With a dataset: Synthetic175B."""

  NUM_LAYERS = 96
  NUM_HEADS = 96
  MODEL_DIMS = 12288
  VOCAB_SIZE = 50257

  ICI_MESH_SHAPE = [1, 8, 1]
  DCN_MESH_SHAPE = [1, 32, 1]
  PERCORE_BATCH_SIZE = 6
  MAX_STEPS = 75_000
  CHECKPOINT_EVERY_N_STEPS = 100
  CHECKPOINT_MAX_TO_KEEP = 10
  SUMMARY_INTERVAL_STEPS = 10

  USE_REPEATED_LAYER = True
  CHECKPOINT_POLICY = 'SAVE_NOTHING'

  LEARNING_RATE = 2e-5
  LR_COS_WARMUP = 265
  LR_COS_DECAY_END = 108_600


@register
class GPT2(GPT126M):
  """124,439,808 parameters: OpenAI's GPT-2 small. `paxlite import` reads its weights. The larger
  sizes need --fdl.NUM_LAYERS, --fdl.NUM_HEADS and --fdl.MODEL_DIMS.
  """

  VOCAB_SIZE = 50257
  MAX_SEQ_LEN = 1024
  NORM_SCALE_OFFSET = 0.0
  INIT_STD = 0.02
  START_ID: int | None = None

  ICI_MESH_SHAPE = [1, 1, 1]
  DCN_MESH_SHAPE = [1, 1, 1]
