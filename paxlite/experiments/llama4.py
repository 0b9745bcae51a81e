"""Llama 4's text model, without a dataset."""

from typing import Literal

import fiddle as fdl

from paxlite.config.attribute_kinds import Count, Function, Shape
from paxlite.config.templates import template
from paxlite.experiments.llama import LLaMA
from paxlite.experiments.parts.attention import AttentionKind
from paxlite.experiments.parts.chunked_attention import ChunkedLayers
from paxlite.experiments.parts.experts import MixtureOfExperts, Router
from paxlite.experiments.parts.feed_forward import Activation
from paxlite.experiments.parts.query_growth import QueryGrowth
from paxlite.experiments.registry import register
from paxlite.layers.moe.moe import InputScaledDispatch


class Llama4(QueryGrowth, ChunkedLayers, MixtureOfExperts, LLaMA):
  """The text model of Llama 4: chunked attention, and full attention without positions, in turns.

  What an expert sees is multiplied by the sigmoid of its logit, and one expert sees every token.
  """

  VOCAB_SIZE = 202_048
  NUM_HEADS = 40
  NUM_KV_HEADS = 8
  DIMS_PER_HEAD = 128
  MODEL_DIMS = 5120
  LAYERNORM_EPSILON = 1e-5
  ROPE_THETA = 500_000.0
  ATTENTION_PATTERN: list[AttentionKind] = ['chunked', 'chunked', 'chunked', 'full_nope']
  QUERY_GROWTH = 0.1
  USE_FFN_BIAS = False

  BLOCKS_PER_LAYER = 1
  NUM_EXPERTS = 16
  NUM_EXPERTS_PER_TOKEN = 1
  NUM_SHARED_EXPERTS = 1
  EXPERT_HIDDEN_DIMS = 8192
  EXPERT_ACTIVATION_CLS: Activation = 'silu'
  USE_GATED_EXPERTS = True
  NORMALIZE_EXPERT_WEIGHTS = False
  ROUTER: Router = 'group_top_k'
  USE_DROPLESS_MOE = True
  AUX_LOSS_COEF = 0.001

  @property
  def ROUTER_SCORES(self) -> Function[Literal['sigmoid', 'softmax']]:
    """Function that makes the scores of experts of the router's logits."""
    return 'sigmoid'

  @property
  def QUERY_GROWTH_LENGTH(self) -> Function[Count]:
    """Tokens after which QUERY_GROWTH makes queries larger for the first time."""
    return 8192

  @property
  def HIDDEN_DIMS(self) -> Shape[Count]:
    """Width inside a feed-forward layer without experts."""
    return 16384

  @property
  def num_first_blocks(self) -> int:
    # without experts, blocks are alike from the first one on
    return super().num_first_blocks if self.has_any_experts else 0

  def position_scale(self) -> fdl.Partial:
    scale = super().position_scale()
    scale.first = 1
    return scale

  def experts(self) -> fdl.Partial:
    experts = super().experts()
    experts.dispatch_tpl = template(InputScaledDispatch, dispatch_tpl=experts.dispatch_tpl)
    return experts


@register
class Llama4Scout(Llama4):
  """107,769,861,120 parameters: the text model of Llama-4-Scout-17B-16E."""

  NUM_LAYERS = 48
  USE_UNSCALED_QK_NORM = True
  ROPE_FACTOR = 16.0
  ROPE_HIGH_FREQUENCY_FACTOR = 1.0
  ICI_MESH_SHAPE = [1, 8, 1]
  DCN_MESH_SHAPE = [1, 2, 1]


@register
class Llama4Maverick(Llama4):
  """400,711,848,960 parameters: the text model of Llama-4-Maverick-17B-128E."""

  NUM_LAYERS = 48
  NUM_EXPERTS = 128
  NUM_DENSE_BLOCKS = 1
  BLOCKS_PER_LAYER = 2
  ICI_MESH_SHAPE = [1, 8, 1]
  DCN_MESH_SHAPE = [1, 8, 1]
