"""Attention within chunks of a text, beside full attention without rotary positions."""

from typing import Literal

import fiddle as fdl

from paxlite.config.attribute_kinds import Count, Function, Shape
from paxlite.config.templates import template
from paxlite.core.errors import UserError
from paxlite.experiments.language_model import LanguageModel
from paxlite.experiments.llama import LLaMA
from paxlite.experiments.llama4.layers import ChunkedAttention, Chunks, InputScaledDispatch
from paxlite.experiments.parts.attention import AttentionKind
from paxlite.experiments.parts.attention_temperature import AttentionTemperature
from paxlite.experiments.parts.experts import GatedExperts, Router
from paxlite.experiments.parts.stack import BlockKind
from paxlite.experiments.registry import register
from paxlite.layers.norms import UnscaledRmsNorm


class ChunkedLayers(LanguageModel, subject='Attention'):
  """A LanguageModel in which ATTENTION_PATTERN may have 'chunked'.

  A token of chunked attention sees the tokens before it whose position is in its own chunk. In such
  a model, queries without rotary positions alone grow with ATTENTION_TEMPERATURE_SCALE.
  """

  CHUNK_LENGTH: Function[Count] = 8192  # positions per chunk; tokens attend within theirs
  # Llama 4's norm of queries and keys, which has no weights and is computed after the rotation.
  USE_UNSCALED_QK_NORM: Function[bool] = (
    False  # unscaled norm of each head's rotated queries and keys
  )

  @property
  def chunk_kinds(self) -> set[AttentionKind]:
    """The kinds of attention within a part of the text."""
    return super().chunk_kinds | {'chunked'}

  def validate(self) -> None:
    super().validate()
    if self.USE_UNSCALED_QK_NORM and self.QK_NORM != 'none':
      raise UserError(f'USE_UNSCALED_QK_NORM=True needs QK_NORM=none, not {self.QK_NORM}')

  def block_of(self, kind: BlockKind) -> fdl.Partial:
    block = super().block_of(kind)
    if kind.attention in self.state_kinds:
      return block
    attention = block.attention_tpl
    if kind.attention == 'chunked':
      fdl.update_callable(attention.attention_tpl, ChunkedAttention)
      attention.attention_tpl.window = 0
      attention.attention_tpl.chunk_length = self.CHUNK_LENGTH
      attention.segments_tpl = template(Chunks, length=self.CHUNK_LENGTH)
      if self.MAX_SEGMENTS_PER_SEQ:  # a segment has several chunks
        attention.attention_tpl.kernel_tpl.max_segments = None
    if attention.rotary_tpl is not None:
      attention.position_scale_tpl = None
      if self.USE_UNSCALED_QK_NORM:
        attention.rotated_norm_tpl = template(
          UnscaledRmsNorm, epsilon=self.LAYERNORM_EPSILON, dtype=self.FPROP_DTYPE
        )
    return block

  def attention_flops_of(self, kind: AttentionKind | None) -> float:
    """A query of chunked attention sees half a chunk in the mean."""
    if kind != 'chunked':
      return super().attention_flops_of(kind)
    return 6.0 * self.attention_dims * min(self.CHUNK_LENGTH, self.MAX_SEQ_LEN)


class Llama4(AttentionTemperature, ChunkedLayers, GatedExperts, LLaMA):
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
  ATTENTION_TEMPERATURE_SCALE = 0.1
  USE_FFN_BIAS = False

  NUM_EXPERTS = 16
  NUM_EXPERTS_PER_TOKEN = 1
  NUM_SHARED_EXPERTS = 1
  EXPERT_HIDDEN_DIMS = 8192
  NORMALIZE_EXPERT_WEIGHTS = False
  ROUTER: Router = 'group_top_k'

  @property
  def ROUTER_SCORES(self) -> Function[Literal['sigmoid', 'softmax']]:
    """Function from router logits to scores."""
    return 'sigmoid'

  @property
  def ATTENTION_TEMPERATURE_FLOOR(self) -> Function[Count]:
    """Tokens after which ATTENTION_TEMPERATURE_SCALE first scales queries."""
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
