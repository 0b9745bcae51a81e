"""Attention within chunks of a text, beside full attention without rotary positions."""

import fiddle as fdl

from paxlite.config.attribute_kinds import Count, Function
from paxlite.config.templates import template
from paxlite.core.errors import UserError
from paxlite.experiments.language_model import LanguageModel
from paxlite.experiments.parts.attention import AttentionKind
from paxlite.experiments.parts.stack import BlockKind
from paxlite.layers.attention.chunked_attention import ChunkedAttention, Chunks
from paxlite.layers.norms import UnscaledRmsNorm


class ChunkedLayers(LanguageModel, subject='Attention'):
  """A LanguageModel in which ATTENTION_PATTERN may have 'chunked'.

  A token of chunked attention sees the tokens before it whose position is in its own chunk. In such
  a model, queries without rotary positions alone grow with QUERY_GROWTH.
  """

  CHUNK_LENGTH: Function[Count] = 8192  # positions of a chunk, within which tokens see each other
  # Llama 4's norm of queries and keys, which has no weights and is computed after the rotation.
  USE_UNSCALED_QK_NORM: Function[bool] = (
    False  # norm of rotated queries and keys of each head, without a scale
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
