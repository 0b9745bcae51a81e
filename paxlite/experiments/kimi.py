"""Kimi Linear: Kimi Delta Attention, and latent attention without positions, without a dataset."""

from paxlite.experiments.deepseek import DeepSeekV3
from paxlite.experiments.parts.attention import AttentionKind
from paxlite.experiments.parts.kimi_delta import KimiDeltaLayers
from paxlite.experiments.registry import register

_KDA: list[AttentionKind] = ['kimi_delta', 'kimi_delta', 'kimi_delta', 'full_nope']


class KimiLinear(KimiDeltaLayers, DeepSeekV3):
  """The architecture; its experts are those of DeepSeek-V3."""

  VOCAB_SIZE = 163_840
  LAYERNORM_EPSILON = 1e-5
  ROPE_LAYOUT = 'half'
  ROPE_FACTOR = 1.0
  QUERY_LATENT_DIMS = 0
  NUM_EXPERTS = 256
  NUM_EXPERTS_PER_TOKEN = 8
  NUM_EXPERT_GROUPS = 1
  NUM_EXPERT_GROUPS_PER_TOKEN = 1
  EXPERT_WEIGHT_SCALE = 2.446
  ATTENTION_PATTERN: list[AttentionKind] = _KDA


@register
class KimiLinear_48B_A3B(KimiLinear):
  """49,122,681,728 parameters: Kimi-Linear-48B-A3B; a token uses 3 billion of them."""

  NUM_LAYERS = 27
  NUM_HEADS = 32
  MODEL_DIMS = 2304
  HIDDEN_DIMS = 9216
  EXPERT_HIDDEN_DIMS = 1024
  ATTENTION_PATTERN = [*6 * _KDA, *_KDA[1:]]
  ICI_MESH_SHAPE = [1, 8, 1]
  DCN_MESH_SHAPE = [1, 2, 1]
