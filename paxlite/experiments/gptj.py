"""GPT-J, without a dataset."""

from paxlite.experiments.llama import LLaMA
from paxlite.experiments.parts.feed_forward import Activation
from paxlite.experiments.parts.stack import BlockOrder
from paxlite.experiments.parts.width_and_norms import Norm
from paxlite.experiments.registry import register


class GPTJ(LLaMA):
  """Attention and feed-forward layers side by side, and rotary positions in a part of a head."""

  VOCAB_SIZE = 50_400
  MAX_SEQ_LEN = 2048
  BLOCK_ORDER: BlockOrder = 'parallel_one_norm'
  ROPE_FRACTION = 0.25
  NORM_CLS: Norm = 'LayerNorm'
  NORM_SCALE_OFFSET = 0.0
  USE_BIAS = False
  USE_FFN_BIAS = True
  USE_SOFTMAX_BIAS = True
  USE_GATED_ACTIVATION = False
  ACTIVATION_CLS: Activation = 'gelu'


@register
class GPTJ_6B(GPTJ):
  """6,050,882,784 parameters: gpt-j-6b."""

  NUM_LAYERS = 28
  NUM_HEADS = 16
  MODEL_DIMS = 4096
  HIDDEN_DIMS = 16384
  ICI_MESH_SHAPE = [1, 8, 1]
