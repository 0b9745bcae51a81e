"""GPT-Neo, without a dataset."""

from paxlite.experiments.llama import LLaMA
from paxlite.experiments.parts.attention import AttentionKind
from paxlite.experiments.parts.feed_forward import Activation
from paxlite.experiments.parts.width_and_norms import Norm
from paxlite.experiments.registry import register


class GPTNeo(LLaMA):
  """GPT-3's blocks, of which every second one has a window, and scores that are not scaled."""

  VOCAB_SIZE = 50_257
  MAX_SEQ_LEN = 2048
  SEPARATE_EMBEDDING = False
  USE_ROTARY_POSITION_EMB = False
  TRAINABLE_POSITION_EMB = True
  SLIDING_WINDOW = 256
  ATTENTION_PATTERN: list[AttentionKind] = ['full', 'sliding']
  NORM_CLS: Norm = 'LayerNorm'
  NORM_SCALE_OFFSET = 0.0
  USE_BIAS = True
  USE_QKV_BIAS = False
  USE_FFN_BIAS = True
  USE_GATED_ACTIVATION = False
  ACTIVATION_CLS: Activation = 'gelu'

  @property
  def attention_scale(self) -> float:
    return 1.0


@register
class GPTNeo125M(GPTNeo):
  """125,198,592 parameters: gpt-neo-125m."""

  NUM_LAYERS = 12
  NUM_HEADS = 12
  MODEL_DIMS = 768
  HIDDEN_DIMS = 3072


@register
class GPTNeo1_3B(GPTNeo):
  """1,315,575,808 parameters: gpt-neo-1.3B."""

  NUM_LAYERS = 24
  NUM_HEADS = 16
  MODEL_DIMS = 2048
  HIDDEN_DIMS = 8192
  ICI_MESH_SHAPE = [1, 8, 1]


@register
class GPTNeo2_7B(GPTNeo):
  """2,651,307,520 parameters: gpt-neo-2.7B."""

  NUM_LAYERS = 32
  NUM_HEADS = 20
  MODEL_DIMS = 2560
  HIDDEN_DIMS = 10240
  ICI_MESH_SHAPE = [1, 8, 1]
