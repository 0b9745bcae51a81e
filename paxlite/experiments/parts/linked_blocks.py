"""Blocks with inputs of their own, and blocks that read the keys of others; see linked_stack."""

import math

import fiddle as fdl

from paxlite.config.attribute_kinds import Count, NotNegativeInt, Shape
from paxlite.config.templates import template
from paxlite.core.errors import UserError
from paxlite.experiments.parts.linked_stack import LinkedStack
from paxlite.experiments.parts.stack import BlockKind
from paxlite.experiments.parts.wide_attention import WideAttention
from paxlite.layers.attention.shared_keys import (
  GivingAttention,
  QueryProjection,
  ReadingAttention,
)
from paxlite.layers.embeddings import TokenEmbedding
from paxlite.layers.layer_inputs import LayerInputLm, LayerInputs
from paxlite.layers.linked_block import InputGate, LinkedScaledBlock


class LinkedBlocks(LinkedStack, WideAttention, subject='Stack of layers'):
  """A model of ScaledBlocks which may have what the small sizes of Gemma 4 have.

  Each reader, one of the last blocks, has queries alone. It reads the keys and values of the last
  block before all readers that has attention of the same kind. A stack of such blocks, or of blocks
  with inputs, repeats no layer.
  """

  LAYER_INPUT_DIMS: Shape[NotNegativeInt] = (
    0  # width of the embedding of tokens that each block has for itself; 0: blocks have none
  )
  NUM_KEY_READERS: Shape[NotNegativeInt] = 0  # last blocks, which read the keys of earlier ones

  @property
  def LAYER_INPUT_VOCAB_SIZE(self) -> Shape[Count]:
    """Rows of the table with the embeddings of the blocks."""
    return self.VOCAB_SIZE

  @property
  def READER_HIDDEN_DIMS(self) -> Shape[Count]:
    """Width inside the feed-forward layers of blocks that read the keys of others."""
    return self.HIDDEN_DIMS

  @property
  def links(self) -> str:
    if not self.LAYER_INPUT_DIMS and not self.NUM_KEY_READERS:
      return ''
    return f'LAYER_INPUT_DIMS={self.LAYER_INPUT_DIMS} with NUM_KEY_READERS={self.NUM_KEY_READERS}'

  def is_reader(self, kind: BlockKind) -> bool:
    """Returns whether a block reads the keys of an earlier one."""
    return kind.number is not None and kind.number >= self.NUM_LAYERS - self.NUM_KEY_READERS

  def hidden_dims_of(self, kind: BlockKind) -> int:
    """Returns the width inside the dense feed-forward layer of a block."""
    return self.READER_HIDDEN_DIMS if self.is_reader(kind) else self.HIDDEN_DIMS

  @property
  def key_sources(self) -> list[int | None]:
    """For each block the number of the block whose keys it reads, or None."""
    kinds = self.block_kinds
    before = range(self.NUM_LAYERS - self.NUM_KEY_READERS)
    last = {kinds[i].attention: i for i in before}
    return [last[kind.attention] if self.is_reader(kind) else None for kind in kinds]

  def validate(self) -> None:
    super().validate()
    if not self.has_links:
      return
    if self.LAYER_INPUT_VOCAB_SIZE < self.VOCAB_SIZE:
      raise UserError(
        f'LAYER_INPUT_VOCAB_SIZE={self.LAYER_INPUT_VOCAB_SIZE} has no rows for some tokens of '
        f'VOCAB_SIZE={self.VOCAB_SIZE}'
      )
    first, pattern = self.NUM_LAYERS - self.NUM_KEY_READERS, self.ATTENTION_PATTERN or ['full']
    kinds = [pattern[i % len(pattern)] for i in range(self.NUM_LAYERS)]
    if missing := [kind for kind in kinds if kind not in kinds[: max(first, 0)]]:
      raise UserError(
        f'NUM_KEY_READERS={self.NUM_KEY_READERS} of NUM_LAYERS={self.NUM_LAYERS} leave no block '
        f'with {missing[0]!r} attention whose keys they could read'
      )

  def block_of(self, kind: BlockKind) -> fdl.Partial:
    block = super().block_of(kind)
    if not self.has_links:
      return block
    fdl.update_callable(block, LinkedScaledBlock)
    attention = block.attention_tpl
    fdl.update_callable(attention, GivingAttention)
    if self.is_reader(kind):
      fdl.update_callable(attention, ReadingAttention)
      attention.value_norm_tpl = None
      sizes = {name: getattr(attention, name) for name in ('model_dims', 'num_heads', 'head_dim')}
      attention.qkv_tpl = template(QueryProjection, **sizes)
      block.ffn_tpl = self.feed_forward(self.READER_HIDDEN_DIMS)
    if self.LAYER_INPUT_DIMS:
      block.input_tpl = template(
        InputGate,
        model_dims=self.MODEL_DIMS,
        input_dims=self.LAYER_INPUT_DIMS,
        activation=self.ACTIVATION_CLS,
        norm_tpl=self.norm(),
      )
    return block

  @property
  def takes_modules(self) -> bool:
    return not self.has_links

  def decoder(self) -> fdl.Config:
    lm = super().decoder()
    if self.LAYER_INPUT_DIMS:
      fdl.update_callable(lm, LayerInputLm)
      lm.layer_inputs_tpl = self.layer_inputs()
    return lm

  def layer_inputs(self) -> fdl.Partial:
    """Returns the template of the inputs of the blocks beside the activations."""
    return template(
      LayerInputs,
      model_dims=self.MODEL_DIMS,
      num_layers=self.NUM_LAYERS,
      input_dims=self.LAYER_INPUT_DIMS,
      table_tpl=template(
        TokenEmbedding,
        vocab_size=self.LAYER_INPUT_VOCAB_SIZE,
        model_dims=self.NUM_LAYERS * self.LAYER_INPUT_DIMS,
        dtype=self.FPROP_DTYPE,
        emb_init=self.weight_init(self.SOFTMAX_INIT_STD),
        lookup_scale=math.sqrt(self.LAYER_INPUT_DIMS),
      ),
      norm_tpl=self.norm(),
    )

  def block_params(self, kind: BlockKind) -> int:
    found = super().block_params(kind) + 2 * self.MODEL_DIMS * self.LAYER_INPUT_DIMS
    if self.is_reader(kind):
      e = self.of_full_attention if kind.attention in ('full', 'full_nope') else self
      queries = 2 * self.MODEL_DIMS * e.NUM_HEADS * e.DIMS_PER_HEAD
      found += queries - self.attention_params_of(kind.attention)
      if not kind.has_experts:
        found += self.ffn_params * (self.READER_HIDDEN_DIMS - self.HIDDEN_DIMS) // self.HIDDEN_DIMS
    return found

  @property
  def matmul_params(self) -> int:
    return super().matmul_params + self.MODEL_DIMS * self.NUM_LAYERS * self.LAYER_INPUT_DIMS
