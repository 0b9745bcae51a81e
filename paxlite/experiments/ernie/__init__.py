"""ERNIE 4.5, without a dataset."""

from typing import Literal

from paxlite.experiments.llama import LLaMA
from paxlite.experiments.parts.experts import GatedExperts, Router
from paxlite.experiments.parts.logits_bias import LogitsBias
from paxlite.experiments.registry import register


class Ernie4_5(LLaMA):
  """ERNIE 4.5: LLaMA's block; Hugging Face's files have the order of rotary pairs that Pax has."""

  VOCAB_SIZE = 103_424
  DIMS_PER_HEAD = 128
  HEADS_SPAN_MODEL = False
  ROPE_THETA = 500_000.0


class Ernie4_5Moe(LogitsBias, GatedExperts, LLaMA):
  """ERNIE 4.5 with experts, which a softmax chooses with a bias that balances the load."""

  VOCAB_SIZE = 103_424
  ROPE_THETA = 500_000.0

  NUM_DENSE_BLOCKS = 1
  ROUTER: Router = 'balanced'
  ROUTER_SCORES: Literal['sigmoid', 'softmax'] = 'softmax'
  BEST_PER_EXPERT_GROUP = 1
  NUM_EXPERTS_PER_TOKEN = 6
  NUM_SHARED_EXPERTS = 2


@register
class Ernie4_5_0_3B(Ernie4_5):
  """360,748,032 parameters: ERNIE-4.5-0.3B, with tied embedding."""

  NUM_LAYERS = 18
  NUM_HEADS = 16
  NUM_KV_HEADS = 2
  MODEL_DIMS = 1024
  HIDDEN_DIMS = 3072
  SEPARATE_EMBEDDING = False
  PERCORE_BATCH_SIZE = 4


@register
class Ernie4_5_21B_A3B(Ernie4_5Moe):
  """21,825,437,888 parameters: ERNIE-4.5-21B-A3B, with tied embedding; 3 billion for a token."""

  NUM_LAYERS = 28
  NUM_HEADS = 20
  NUM_KV_HEADS = 4
  MODEL_DIMS = 2560
  HIDDEN_DIMS = 12288
  EXPERT_HIDDEN_DIMS = 1536
  SEPARATE_EMBEDDING = False
  ICI_MESH_SHAPE = [1, 8, 1]
  DCN_MESH_SHAPE = [1, 2, 1]
