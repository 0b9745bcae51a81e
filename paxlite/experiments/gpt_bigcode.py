"""SantaCoder and StarCoder, without a dataset."""

from paxlite.experiments.llama import LLaMA
from paxlite.experiments.parts.feed_forward import Activation
from paxlite.experiments.parts.width_and_norms import Norm
from paxlite.experiments.registry import register


class GPTBigCode(LLaMA):
  """GPT-2 in which all heads of queries share one head of keys and values."""

  VOCAB_SIZE = 49_152
  MAX_SEQ_LEN = 8192
  NUM_KV_HEADS = 1
  SEPARATE_EMBEDDING = False
  USE_ROTARY_POSITION_EMB = False
  TRAINABLE_POSITION_EMB = True
  NORM_CLS: Norm = 'LayerNorm'
  NORM_SCALE_OFFSET = 0.0
  USE_BIAS = True
  USE_FFN_BIAS = True
  USE_GATED_ACTIVATION = False
  ACTIVATION_CLS: Activation = 'gelu'


@register
class SantaCoder(GPTBigCode):
  """1,124,886,528 parameters: SantaCoder, in the form of gpt_bigcode."""

  NUM_LAYERS = 24
  NUM_HEADS = 16
  MODEL_DIMS = 2048
  HIDDEN_DIMS = 8192
  VOCAB_SIZE = 49_280
  MAX_SEQ_LEN = 2048
  ICI_MESH_SHAPE = [1, 8, 1]


@register
class StarCoder15B(GPTBigCode):
  """15,517,456,384 parameters: StarCoder and StarCoderBase."""

  NUM_LAYERS = 40
  NUM_HEADS = 48
  MODEL_DIMS = 6144
  HIDDEN_DIMS = 24576
  ACTIVATION_CLS: Activation = 'gelu_exact'
  ICI_MESH_SHAPE = [1, 8, 1]
