"""GPT-NeoX and Pythia, without a dataset."""

from paxlite.experiments.llama import LLaMA
from paxlite.experiments.parts.parallel_blocks import BlockOrder, ParallelBlocks
from paxlite.experiments.parts.partial_positions import PartialPositions
from paxlite.experiments.parts.stack import Activation
from paxlite.experiments.parts.width_and_norms import Norm
from paxlite.experiments.registry import register


class GPTNeoX(ParallelBlocks, PartialPositions, LLaMA):
  """GPT-NeoX: attention and feed-forward layers side by side, LayerNorm, biases, and no gates."""

  VOCAB_SIZE = 50_432
  MAX_SEQ_LEN = 2048
  BLOCK_ORDER: BlockOrder = 'parallel'
  ROPE_LAYOUT = 'half'
  ROPE_FRACTION = 0.25
  NORM_CLS: Norm = 'LayerNorm'
  NORM_SCALE_OFFSET = 0.0
  USE_BIAS = True
  USE_FFN_BIAS = True
  USE_GATED_ACTIVATION = False
  ACTIVATION_CLS: Activation = 'gelu_exact'


@register
class GPTNeoX20B(GPTNeoX):
  """20,554,567,680 parameters: gpt-neox-20b, whose GELU is the tanh approximation."""

  NUM_LAYERS = 44
  NUM_HEADS = 64
  MODEL_DIMS = 6144
  HIDDEN_DIMS = 24576
  ACTIVATION_CLS: Activation = 'gelu'
  ICI_MESH_SHAPE = [1, 8, 1]
  DCN_MESH_SHAPE = [1, 2, 1]


@register
class Pythia160M(GPTNeoX):
  """162,322,944 parameters: pythia-160m."""

  NUM_LAYERS = 12
  NUM_HEADS = 12
  MODEL_DIMS = 768
  HIDDEN_DIMS = 3072
  VOCAB_SIZE = 50_304
  PERCORE_BATCH_SIZE = 4


@register
class Pythia410M(GPTNeoX):
  """405,334,016 parameters: pythia-410m."""

  NUM_LAYERS = 24
  NUM_HEADS = 16
  MODEL_DIMS = 1024
  HIDDEN_DIMS = 4096
  VOCAB_SIZE = 50_304
  PERCORE_BATCH_SIZE = 4


@register
class Pythia1_4B(GPTNeoX):
  """1,414,647,808 parameters: pythia-1.4b."""

  NUM_LAYERS = 24
  NUM_HEADS = 16
  MODEL_DIMS = 2048
  HIDDEN_DIMS = 8192
  VOCAB_SIZE = 50_304
  ICI_MESH_SHAPE = [1, 8, 1]


@register
class Pythia6_9B(GPTNeoX):
  """6,857,302,016 parameters: pythia-6.9b."""

  NUM_LAYERS = 32
  NUM_HEADS = 32
  MODEL_DIMS = 4096
  HIDDEN_DIMS = 16384
  ICI_MESH_SHAPE = [1, 8, 1]


@register
class Pythia12B(GPTNeoX):
  """11,846,072,320 parameters: pythia-12b."""

  NUM_LAYERS = 36
  NUM_HEADS = 40
  MODEL_DIMS = 5120
  HIDDEN_DIMS = 20480
  VOCAB_SIZE = 50_688
  ICI_MESH_SHAPE = [1, 8, 1]
