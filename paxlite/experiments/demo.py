"""Experiments that run on a laptop."""

from paxlite.experiment import register
from paxlite.experiments.datasets import EmbeddedText, Synthetic
from paxlite.experiments.gpt import GPT126M


@register
class DemoGPT(EmbeddedText, GPT126M):
  """python -m paxlite.main --fdl_config=DemoGPT --job_log_dir=logs/demo

  A small GPT on the King James Bible and Shakespeare.
  """

  NUM_LAYERS = 4
  NUM_HEADS = 4
  MODEL_DIMS = 256
  VOCAB_SIZE = 8192
  MAX_SEQ_LEN = 256
  FPROP_DTYPE = 'float32'
  PACKED_INPUT = False

  ICI_MESH_SHAPE = [1, 1, 1]
  DCN_MESH_SHAPE = [1, 1, 1]
  PERCORE_BATCH_SIZE = 8

  MAX_STEPS = 800
  CHECKPOINT_EVERY_N_STEPS = 200
  CHECKPOINT_MAX_TO_KEEP = 2
  SUMMARY_INTERVAL_STEPS = 20
  EVAL_INTERVAL_STEPS = 200
  EVAL_BATCH_SIZE = 16

  LEARNING_RATE = 2e-3
  LR_COS_WARMUP = 40
  LR_COS_DECAY_END = 800
  SAMPLE_PROMPT = 'And it came to pass'


@register
class TinyGPT(Synthetic, GPT126M):
  """python -m paxlite.main --fdl_config=TinyGPT --job_log_dir=logs/tiny

  The smallest: 10 steps on random tokens in a few seconds.
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
