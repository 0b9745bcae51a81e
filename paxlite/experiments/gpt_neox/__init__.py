"""GPT-NeoX and Pythia, without a dataset."""

from paxlite.experiments.llama import LLaMA
from paxlite.experiments.parts.parallel_blocks import BlockOrder, ParallelBlocks
from paxlite.experiments.parts.partial_positions import PartialPositions
from paxlite.experiments.parts.stack import Activation
from paxlite.experiments.parts.width_and_norms import Norm
from paxlite.experiments.published_models import define


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


__getattr__ = define(globals())  # the published sizes: models.json
