"""Mixtral: Mistral's block with eight gated experts, without a dataset."""

from paxlite.experiments.llama import LLaMA
from paxlite.experiments.parts.experts import GatedExperts
from paxlite.experiments.registry import register


class Mixtral(GatedExperts, LLaMA):
  """Mixtral: LLaMA's block with gated experts."""

  ROPE_THETA = 1e6
  ROPE_LAYOUT = 'half'
  NUM_EXPERTS = 8
  AUX_LOSS_COEF = 0.02


@register
class Mixtral_8x7B(Mixtral):
  """46,702,792,704 parameters: Mixtral-8x7B; a token uses 13 billion of them."""

  NUM_LAYERS = 32
  NUM_HEADS = 32
  NUM_KV_HEADS = 8
  MODEL_DIMS = 4096
  HIDDEN_DIMS = 14336
  ICI_MESH_SHAPE = [1, 8, 1]
  DCN_MESH_SHAPE = [1, 4, 1]


@register
class Mixtral_8x22B(Mixtral):
  """140,620,634,112 parameters: Mixtral-8x22B; a token uses 39 billion of them."""

  NUM_LAYERS = 56
  NUM_HEADS = 48
  NUM_KV_HEADS = 8
  MODEL_DIMS = 6144
  HIDDEN_DIMS = 16384
  ICI_MESH_SHAPE = [1, 8, 1]
  DCN_MESH_SHAPE = [1, 8, 1]
