"""Gemma 1: LLaMA's block with GELU, norms around 1, and a tied, scaled embedding."""

from paxlite.experiments.llama import LLaMA
from paxlite.experiments.registry import register


class Gemma(LLaMA):
  """The architecture of all sizes."""

  VOCAB_SIZE = 256_128
  MAX_SEQ_LEN = 8192
  DIMS_PER_HEAD = 256
  HEADS_SPAN_MODEL = False

  SEPARATE_EMBEDDING = False
  SCALE_EMBEDDING = True
  ACTIVATION_CLS = 'gelu'
  NORM_SCALE_OFFSET = 1.0
  LAYERNORM_EPSILON = 1e-6


@register
class Gemma2B(Gemma):
  """python -m paxlite.main --fdl_config=Gemma2B --dry_run

  2,506,434,560 parameters, one key-value head.

  The vocabulary is Gemma's original one of 256,128 rows. Files from Hugging Face have 256,000 rows,
  and weights imported from them record that number.
  """

  NUM_LAYERS = 18
  NUM_HEADS = 8
  NUM_KV_HEADS = 1
  MODEL_DIMS = 2048
  HIDDEN_DIMS = 16384

  ICI_MESH_SHAPE = [1, 8, 1]
  PERCORE_BATCH_SIZE = 2


@register
class Gemma7B(Gemma):
  """python -m paxlite.main --fdl_config=Gemma7B --dry_run

  8,538,074,112 parameters; its 16 heads of 256 dimensions are wider than the model's 3072.
  """

  NUM_LAYERS = 28
  NUM_HEADS = 16
  MODEL_DIMS = 3072
  HIDDEN_DIMS = 24576

  ICI_MESH_SHAPE = [1, 8, 1]
  PERCORE_BATCH_SIZE = 1
