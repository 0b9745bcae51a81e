"""Phi-1 to Phi-4, without a dataset."""

from paxlite.experiments.llama import LLaMA
from paxlite.experiments.parts.logits_bias import LogitsBias
from paxlite.experiments.parts.parallel_blocks import BlockOrder, ParallelBlocks
from paxlite.experiments.parts.partial_positions import PartialPositions
from paxlite.experiments.parts.positions import RopeScaling
from paxlite.experiments.parts.stack import Activation
from paxlite.experiments.parts.width_and_norms import Norm
from paxlite.experiments.phi.long_positions import LongPositions
from paxlite.experiments.published_models import define


class Phi(ParallelBlocks, PartialPositions, LogitsBias, LLaMA):
  """Phi-1 and Phi-2: attention and feed-forward layers side by side, after one LayerNorm."""

  VOCAB_SIZE = 51_200
  MAX_SEQ_LEN = 2048
  BLOCK_ORDER: BlockOrder = 'parallel_one_norm'
  ROPE_LAYOUT = 'half'
  ROPE_FRACTION = 0.5
  NORM_CLS: Norm = 'LayerNorm'
  NORM_SCALE_OFFSET = 0.0
  USE_BIAS = True
  USE_SOFTMAX_BIAS = True
  USE_GATED_ACTIVATION = False
  ACTIVATION_CLS: Activation = 'gelu'


class Phi3(PartialPositions, LongPositions, LLaMA):
  """Phi-3 and Phi-4: LLaMA's block, whose published weights are packed."""

  VOCAB_SIZE = 32064
  ROPE_LAYOUT = 'half'
  ROPE_SCALING: RopeScaling = 'longrope'
  ROPE_ORIGINAL_LENGTH = 4096


__getattr__ = define(globals())  # the published sizes: models.json
