"""Experiments that run on a laptop."""

from paxlite.experiments.datasets import EmbeddedText, Synthetic
from paxlite.experiments.gpt import GPT126M
from paxlite.experiments.muon_recipe import MuonRecipe
from paxlite.experiments.registry import register


class _Demo(EmbeddedText, GPT126M):
  """Shared values of the demos."""

  NUM_LAYERS = 4
  NUM_HEADS = 4
  MODEL_DIMS = 256
  VOCAB_SIZE = 8192
  MAX_SEQ_LEN = 256
  FPROP_DTYPE = 'float32'
  PACKED_INPUT = False

  ICI_MESH_SHAPE = [1, 1, 1]
  DCN_MESH_SHAPE = [1, 1, 1]
  PERCORE_BATCH_SIZE = 4

  USE_ROTARY_POSITION_EMB = True

  MAX_STEPS = 750
  CHECKPOINT_EVERY_N_STEPS = 250
  CHECKPOINT_MAX_TO_KEEP = 2
  SUMMARY_INTERVAL_STEPS = 20
  EVAL_INTERVAL_STEPS = 250
  EVAL_BATCH_SIZE = 16
  SAMPLE_PROMPT = 'And it came to pass'


@register
class DemoGPT(MuonRecipe, _Demo):
  """python -m paxlite.main --fdl_config=DemoGPT --job_log_dir=logs/demo

  A small GPT on the King James Bible and Shakespeare: 5.3 M parameters, 512k tokens. Training takes
  three to five minutes on two cores. It reaches about 1.81 bits per byte on held-out text (xz -9:
  about 2.2).
  """

  MAX_STEPS = 500
  HIDDEN_DIMS = 1152


@register
class DemoGPTAdam(_Demo):
  """The same sizes and data with Adam and a gated feed-forward layer: about 1.9 bits per byte."""

  # Measured here at 700 steps: 2.00 bits per byte with GPT126M's values, 1.98 with beta2 0.99, and
  # 1.91 with rotary positions and a gated feed-forward layer of the same size as well.
  USE_GATED_ACTIVATION = True
  ACTIVATION_CLS = 'silu'
  HIDDEN_DIMS = 768

  LEARNING_RATE = 1e-3
  ADAM_BETA2 = 0.99
  LR_COS_WARMUP = 40
  LR_COS_DECAY_END = 750


@register
class TinyGPT(Synthetic, GPT126M):
  """python -m paxlite.main --fdl_config=TinyGPT --job_log_dir=logs/tiny

  The smallest experiment: 10 steps on made-up tokens in a few seconds.
  """

  NUM_LAYERS = 2
  NUM_HEADS = 4
  MODEL_DIMS = 32
  VOCAB_SIZE = 128
  MAX_SEQ_LEN = 32
  FPROP_DTYPE = 'float32'
  PACKED_INPUT = False

  ICI_MESH_SHAPE = [1, 1, 1]
  DCN_MESH_SHAPE = [1, 1, 1]
  MAX_STEPS = 10
  SUMMARY_INTERVAL_STEPS = 1
  CHECKPOINT_EVERY_N_STEPS = 5
  LR_COS_WARMUP = 2
  LR_COS_DECAY_END = 10
