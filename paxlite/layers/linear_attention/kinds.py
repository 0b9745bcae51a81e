"""The layers that have a state instead of keys."""

from paxlite.layers.linear_attention.gated_delta_net import GatedDeltaNet
from paxlite.layers.linear_attention.kimi_delta import KimiDeltaAttention
from paxlite.layers.linear_attention.mamba2 import Mamba2
from paxlite.layers.linear_attention.short_convolution import ShortConvolution

LAYERS_WITH_STATE = (
  GatedDeltaNet,
  KimiDeltaAttention,
  Mamba2,
  ShortConvolution,
)
