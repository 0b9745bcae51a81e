"""Phi-1 to Phi-4, without a dataset."""

from paxlite.experiments.llama import LLaMA
from paxlite.experiments.parts.logits_bias import LogitsBias
from paxlite.experiments.parts.parallel_blocks import BlockOrder, ParallelBlocks
from paxlite.experiments.parts.partial_positions import PartialPositions
from paxlite.experiments.parts.positions import RopeScaling
from paxlite.experiments.parts.stack import Activation
from paxlite.experiments.parts.width_and_norms import Norm
from paxlite.experiments.phi.long_positions import LongPositions
from paxlite.experiments.registry import register


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


@register
class Phi1_5(Phi):
  """1,418,270,720 parameters: phi-1 and phi-1.5."""

  NUM_LAYERS = 24
  NUM_HEADS = 32
  MODEL_DIMS = 2048
  HIDDEN_DIMS = 8192
  ICI_MESH_SHAPE = [1, 8, 1]


@register
class Phi2(Phi):
  """2,779,683,840 parameters: phi-2."""

  NUM_LAYERS = 32
  NUM_HEADS = 32
  MODEL_DIMS = 2560
  HIDDEN_DIMS = 10240
  ROPE_FRACTION = 0.4
  ICI_MESH_SHAPE = [1, 8, 1]


@register
class Phi3_Mini(Phi3):
  """3,821,079,552 parameters: Phi-3-mini-4k, with a sliding window of 2047 tokens."""

  NUM_LAYERS = 32
  NUM_HEADS = 32
  MODEL_DIMS = 3072
  HIDDEN_DIMS = 8192
  SLIDING_WINDOW = 2047
  ICI_MESH_SHAPE = [1, 8, 1]


@register
class Phi3_Medium(Phi3):
  """13,960,238,080 parameters: Phi-3-medium-4k, with a sliding window of 2047 tokens."""

  NUM_LAYERS = 40
  NUM_HEADS = 40
  NUM_KV_HEADS = 10
  MODEL_DIMS = 5120
  HIDDEN_DIMS = 17920
  SLIDING_WINDOW = 2047
  ICI_MESH_SHAPE = [1, 8, 1]


@register
class Phi4(Phi3):
  """14,659,507,200 parameters: phi-4."""

  NUM_LAYERS = 40
  NUM_HEADS = 40
  NUM_KV_HEADS = 10
  MODEL_DIMS = 5120
  HIDDEN_DIMS = 17920
  VOCAB_SIZE = 100_352
  ROPE_THETA = 250_000.0
  ICI_MESH_SHAPE = [1, 8, 1]


@register
class Phi4_Mini(Phi3):
  """3,836,021,760 parameters: Phi-4-mini, tied embedding, rotary positions stretched by 32."""

  NUM_LAYERS = 32
  NUM_HEADS = 24
  NUM_KV_HEADS = 8
  MODEL_DIMS = 3072
  HIDDEN_DIMS = 8192
  VOCAB_SIZE = 200_064
  SEPARATE_EMBEDDING = False
  SLIDING_WINDOW = 262_144
  ROPE_FRACTION = 0.75
  ROPE_FACTOR = 32.0
  ROPE_SHORT_FACTORS: list[float] = [1.0] * 48
  ROPE_LONG_FACTORS: list[float] = [
    1.0, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649,
    2.446418898, 2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845,
    5.351743533, 5.984965424, 6.693110555, 7.485043894, 8.370679318, 9.36110372, 10.4687158,
    11.70738129, 13.09260651, 14.64173252, 16.37415215, 18.31155283, 20.47818807, 22.90118105,
    25.61086418, 28.64115884, 32.03, 32.1, 32.13, 32.23, 32.6, 32.61, 32.64, 32.66, 32.7, 32.71,
    32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77,
  ]  # fmt: skip
  ICI_MESH_SHAPE = [1, 8, 1]
