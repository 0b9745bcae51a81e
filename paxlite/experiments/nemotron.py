"""Nemotron-H and Nemotron 3, whose blocks have one layer each, without a dataset."""

from paxlite.experiments.llama import LLaMA
from paxlite.experiments.parts.attention import AttentionKind
from paxlite.experiments.parts.experts import MixtureOfExperts, Router
from paxlite.experiments.parts.feed_forward import Activation
from paxlite.experiments.parts.mamba2 import Mamba2Layers
from paxlite.experiments.parts.single_blocks import SingleBlocks


class NemotronH(SingleBlocks, Mamba2Layers, MixtureOfExperts, LLaMA):
  """The architecture, with dense feed-forward layers, experts, or both.

  Attention has no positions, and no feed-forward layer has a gate.
  """

  VOCAB_SIZE = 131_072
  DIMS_PER_HEAD = 128
  HEADS_SPAN_MODEL = False
  ROPE_LAYOUT = 'half'
  ATTENTION_PATTERN: list[AttentionKind] = ['mamba2', 'experts', 'full_nope', 'feed_forward']
  ACTIVATION_CLS: Activation = 'relu2'
  USE_GATED_ACTIVATION = False
  MAMBA_GROUPS = 8
  MAMBA_LEAST_STEP = 0.001
  MAMBA_ACTIVATION_CLS: Activation = 'silu'
  USE_CONVOLUTION_BIAS = True
  USE_STATE_BIAS = False
  BLOCKS_PER_LAYER = 1
  NUM_EXPERTS = 8
  NUM_EXPERTS_PER_TOKEN = 2
  NUM_SHARED_EXPERTS = 1
  EXPERT_ACTIVATION_CLS: Activation = 'relu2'
  USE_GATED_EXPERTS = False
  USE_DROPLESS_MOE = True
  ROUTER: Router = 'balanced'
  AUX_LOSS_COEF = 0.0
