"""Gemma 4: blocks with inputs of their own, and blocks that read the keys of earlier blocks."""

import math
from typing import Self

import fiddle as fdl

from paxlite.config.attribute_kinds import Count, Fraction, Function, NotNegativeInt, Shape
from paxlite.config.templates import template
from paxlite.core.errors import UserError
from paxlite.experiments.gemma import Gemma3
from paxlite.experiments.gemma4.layers import (
  InputGate,
  KVSharedAttention,
  KVSourceAttention,
  LinkedScaledBlock,
  NormedExperts,
  PerLayerEmbeddingLm,
  PerLayerEmbeddings,
  ProportionalRotaryEmbedding,
  QueryProjection,
  ScaledBlock,
  ScaledRouter,
  SharedKeyValue,
)
from paxlite.experiments.language_model import LanguageModel
from paxlite.experiments.parts.attention import AttentionKind
from paxlite.experiments.parts.experts import GatedExperts
from paxlite.experiments.parts.linked_stack import LinkedStack
from paxlite.experiments.parts.stack import Activation, BlockKind
from paxlite.experiments.registry import register
from paxlite.layers.attention.attention_case import Case
from paxlite.layers.embeddings import TokenEmbedding
from paxlite.layers.norms import UnscaledRmsNorm

_FULL = ('full', 'full_nope')


class WideAttention(LanguageModel, subject='Attention'):
  """A LanguageModel with sliding and full attention that have heads of their own, as Gemma 4."""

  KEYS_ARE_VALUES: Shape[bool] = (
    False  # full attention reuses keys, before norm and positions, as values
  )
  USE_VALUE_NORM: Function[bool] = False  # unscaled norm of each head's values
  FULL_ROPE_SHARE: Function[Fraction] = (
    1.0  # share of pairs, from the first, that RoPE rotates in full attention
  )

  @property
  def FULL_DIMS_PER_HEAD(self) -> Shape[Count]:
    """Head width of full attention."""
    return self.DIMS_PER_HEAD

  @property
  def FULL_KV_HEADS(self) -> Shape[Count]:
    """Key-value heads of full attention."""
    return self.NUM_KV_HEADS

  @property
  def of_full_attention(self) -> Self:
    """The same experiment, in which all attention has the heads of full attention."""
    return self.replaced(
      DIMS_PER_HEAD=self.FULL_DIMS_PER_HEAD, NUM_KV_HEADS=self.FULL_KV_HEADS,
      FULL_DIMS_PER_HEAD=self.FULL_DIMS_PER_HEAD, FULL_KV_HEADS=self.FULL_KV_HEADS,
      HEADS_SPAN_MODEL=False,
    )  # fmt: skip

  @property
  def has_own_heads(self) -> bool:
    """Whether heads of full attention differ from those of sliding attention."""
    own = self.FULL_DIMS_PER_HEAD, self.FULL_KV_HEADS
    return own != (self.DIMS_PER_HEAD, self.NUM_KV_HEADS)

  def validate(self) -> None:
    super().validate()
    if self.NUM_HEADS % self.FULL_KV_HEADS:
      raise UserError(
        f'NUM_HEADS={self.NUM_HEADS} is not divisible by FULL_KV_HEADS={self.FULL_KV_HEADS}'
      )
    if self.FULL_DIMS_PER_HEAD % 2:
      raise UserError(
        f'rotary positions need an even FULL_DIMS_PER_HEAD, not {self.FULL_DIMS_PER_HEAD}'
      )
    if self.FULL_ROPE_SHARE != 1 and self.stretches_positions:
      raise UserError(
        f'FULL_ROPE_SHARE={self.FULL_ROPE_SHARE:g} needs unstretched positions, but '
        f'ROPE_FACTOR={self.ROPE_FACTOR:g} stretches them'
      )

  def attention_case(self, window: int = 0, platform: str = 'cpu', capability: float = 0.0) -> Case:
    if window or not self.has_own_heads:
      return super().attention_case(window, platform, capability)
    return self.of_full_attention.attention_case(window, platform, capability)

  def attention(self) -> fdl.Partial:
    attention = super().attention()
    if self.USE_VALUE_NORM:
      attention.value_norm_tpl = template(
        UnscaledRmsNorm, epsilon=self.LAYERNORM_EPSILON, dtype=self.FPROP_DTYPE
      )
    return attention

  def rotary(self, is_local: bool = False) -> fdl.Partial:
    if is_local or self.FULL_ROPE_SHARE == 1:
      return super().rotary(is_local)
    return template(
      ProportionalRotaryEmbedding, theta=self.ROPE_THETA, layout=self.ROPE_LAYOUT,
      share=self.FULL_ROPE_SHARE,
    )  # fmt: skip

  def block_of(self, kind: BlockKind) -> fdl.Partial:
    block = super().block_of(kind)
    if kind.attention not in _FULL:
      return block
    attention = self.of_full_attention.attention()
    attention.attention_tpl.window = 0
    if kind.attention == 'full_nope':
      attention.rotary_tpl = None
    if self.KEYS_ARE_VALUES:
      attention.qkv_tpl = template(
        SharedKeyValue, model_dims=self.MODEL_DIMS, num_heads=self.NUM_HEADS,
        num_kv_heads=self.FULL_KV_HEADS, head_dim=self.FULL_DIMS_PER_HEAD,
      )  # fmt: skip
    block.attention_tpl = attention
    return block

  def attention_params_of(self, kind: AttentionKind | None) -> int:
    if kind not in _FULL:
      return super().attention_params_of(kind)
    values = self.FULL_KV_HEADS if self.KEYS_ARE_VALUES else 0
    heads = 2 * (self.NUM_HEADS + self.FULL_KV_HEADS) - values
    return self.MODEL_DIMS * self.FULL_DIMS_PER_HEAD * heads

  def attention_flops_of(self, kind: AttentionKind | None) -> float:
    found = super().attention_flops_of(kind)
    wider = self.FULL_DIMS_PER_HEAD / self.DIMS_PER_HEAD
    return found * wider if kind in _FULL else found


class LinkedBlocks(LinkedStack, WideAttention, subject='Stack of layers'):
  """A model of ScaledBlocks which may have what the small sizes of Gemma 4 have.

  The last NUM_KV_SHARED_LAYERS have queries alone. Each attends to the keys and values of the last
  layer before them with attention of the same kind. A stack of such layers, or of layers with
  embeddings of their own, repeats no layer.
  """

  PER_LAYER_EMBEDDING_DIMS: Shape[NotNegativeInt] = (
    0  # width of per-layer token embeddings (PLE); 0: none
  )
  NUM_KV_SHARED_LAYERS: Shape[NotNegativeInt] = (
    0  # last layers that reuse keys and values of earlier layers
  )

  @property
  def PER_LAYER_EMBEDDING_VOCAB_SIZE(self) -> Shape[Count]:
    """Rows of the per-layer embedding table."""
    return self.VOCAB_SIZE

  @property
  def KV_SHARED_HIDDEN_DIMS(self) -> Shape[Count]:
    """Feed-forward width in NUM_KV_SHARED_LAYERS."""
    return self.HIDDEN_DIMS

  @property
  def links(self) -> str:
    if not self.PER_LAYER_EMBEDDING_DIMS and not self.NUM_KV_SHARED_LAYERS:
      return ''
    return (
      f'PER_LAYER_EMBEDDING_DIMS={self.PER_LAYER_EMBEDDING_DIMS} with '
      f'NUM_KV_SHARED_LAYERS={self.NUM_KV_SHARED_LAYERS}'
    )

  def is_kv_shared(self, kind: BlockKind) -> bool:
    """Returns whether a block reads the keys of an earlier one."""
    return kind.number is not None and kind.number >= self.NUM_LAYERS - self.NUM_KV_SHARED_LAYERS

  def hidden_dims_of(self, kind: BlockKind) -> int:
    """Returns the width inside the dense feed-forward layer of a block."""
    return self.KV_SHARED_HIDDEN_DIMS if self.is_kv_shared(kind) else self.HIDDEN_DIMS

  @property
  def key_sources(self) -> list[int | None]:
    """For each block the number of the block whose keys it reads, or None."""
    kinds = self.block_kinds
    before = range(self.NUM_LAYERS - self.NUM_KV_SHARED_LAYERS)
    last = {kinds[i].attention: i for i in before}
    return [last[kind.attention] if self.is_kv_shared(kind) else None for kind in kinds]

  def validate(self) -> None:
    super().validate()
    if not self.has_links:
      return
    if self.PER_LAYER_EMBEDDING_VOCAB_SIZE < self.VOCAB_SIZE:
      raise UserError(
        f'PER_LAYER_EMBEDDING_VOCAB_SIZE={self.PER_LAYER_EMBEDDING_VOCAB_SIZE} has no '
        f'rows for some tokens of VOCAB_SIZE={self.VOCAB_SIZE}'
      )
    first, pattern = self.NUM_LAYERS - self.NUM_KV_SHARED_LAYERS, self.ATTENTION_PATTERN or ['full']
    kinds = [pattern[i % len(pattern)] for i in range(self.NUM_LAYERS)]
    if missing := [kind for kind in kinds if kind not in kinds[: max(first, 0)]]:
      raise UserError(
        f'NUM_KV_SHARED_LAYERS={self.NUM_KV_SHARED_LAYERS} of NUM_LAYERS={self.NUM_LAYERS} leave '
        f'no earlier block with {missing[0]!r} attention to share keys with'
      )

  def block_of(self, kind: BlockKind) -> fdl.Partial:
    block = super().block_of(kind)
    if not self.has_links:
      return block
    fdl.update_callable(block, LinkedScaledBlock)
    attention = block.attention_tpl
    fdl.update_callable(attention, KVSourceAttention)
    if self.is_kv_shared(kind):
      fdl.update_callable(attention, KVSharedAttention)
      attention.value_norm_tpl = None
      sizes = {name: getattr(attention, name) for name in ('model_dims', 'num_heads', 'head_dim')}
      attention.qkv_tpl = template(QueryProjection, **sizes)
      block.ffn_tpl = self.feed_forward(self.KV_SHARED_HIDDEN_DIMS)
    if self.PER_LAYER_EMBEDDING_DIMS:
      block.input_tpl = template(
        InputGate, model_dims=self.MODEL_DIMS, input_dims=self.PER_LAYER_EMBEDDING_DIMS,
        activation=self.ACTIVATION_CLS, norm_tpl=self.norm(),
      )  # fmt: skip
    return block

  @property
  def takes_modules(self) -> bool:
    return not self.has_links

  def decoder(self) -> fdl.Config:
    lm = super().decoder()
    if self.PER_LAYER_EMBEDDING_DIMS:
      fdl.update_callable(lm, PerLayerEmbeddingLm)
      lm.layer_inputs_tpl = self.layer_inputs()
    return lm

  def layer_inputs(self) -> fdl.Partial:
    """Returns the template of the inputs of the blocks beside the activations."""
    return template(
      PerLayerEmbeddings,
      model_dims=self.MODEL_DIMS,
      num_layers=self.NUM_LAYERS,
      input_dims=self.PER_LAYER_EMBEDDING_DIMS,
      table_tpl=template(
        TokenEmbedding, vocab_size=self.PER_LAYER_EMBEDDING_VOCAB_SIZE,
        model_dims=self.NUM_LAYERS * self.PER_LAYER_EMBEDDING_DIMS, dtype=self.FPROP_DTYPE,
        emb_init=self.weight_init(self.SOFTMAX_INIT_STD),
        lookup_scale=math.sqrt(self.PER_LAYER_EMBEDDING_DIMS),
      ),
      norm_tpl=self.norm(),
    )  # fmt: skip

  def block_params(self, kind: BlockKind) -> int:
    found = super().block_params(kind) + 2 * self.MODEL_DIMS * self.PER_LAYER_EMBEDDING_DIMS
    if self.is_kv_shared(kind):
      e = self.of_full_attention if kind.attention in ('full', 'full_nope') else self
      queries = 2 * self.MODEL_DIMS * e.NUM_HEADS * e.DIMS_PER_HEAD
      found += queries - self.attention_params_of(kind.attention)
      if not kind.has_experts:
        found += (
          self.ffn_params * (self.KV_SHARED_HIDDEN_DIMS - self.HIDDEN_DIMS) // self.HIDDEN_DIMS
        )
    return found

  @property
  def matmul_params(self) -> int:
    return super().matmul_params + self.MODEL_DIMS * self.NUM_LAYERS * self.PER_LAYER_EMBEDDING_DIMS


class Gemma4(LinkedBlocks, GatedExperts, Gemma3):  # type: ignore[override]
  """The text model of Gemma 4: full attention has wider heads, in which keys may be the values.

  In small sizes, blocks have embeddings of their own, and the last ones read the keys of others.
  Blocks have a factor that training leaves alone. All blocks have experts beside a dense layer, or
  none has; models without experts have as many dense blocks as layers.
  """

  VOCAB_SIZE = 262_144
  NORM_SCALE_OFFSET = 0.0
  QUERY_PRE_ATTN_SCALAR = 1
  SOFTMAX_CAP_LOGITS = 30.0
  ROPE_FACTOR = 1.0
  USE_VALUE_NORM = True
  FULL_DIMS_PER_HEAD = 512
  FULL_ROPE_SHARE = 0.25

  NUM_EXPERTS = 128
  NUM_EXPERTS_PER_TOKEN = 8
  NUM_SHARED_EXPERTS = 1
  EXPERT_ACTIVATION_CLS: Activation = 'gelu'

  @property
  def SHARED_EXPERT_HIDDEN_DIMS(self) -> Shape[Count]:
    """Width inside the dense layer beside the experts."""
    return self.HIDDEN_DIMS

  def shared_hidden_dims_of(self, kind: BlockKind) -> int:
    of_others = super().shared_hidden_dims_of(kind)
    return self.KV_SHARED_HIDDEN_DIMS if self.is_kv_shared(kind) else of_others

  @property
  def num_first_blocks(self) -> int:
    return 0  # blocks are alike from the first one on

  def validate(self) -> None:
    super().validate()
    if self.NUM_DENSE_BLOCKS not in (0, self.NUM_LAYERS):
      raise UserError(
        f'NUM_DENSE_BLOCKS={self.NUM_DENSE_BLOCKS} of {type(self).__name__} must be 0 or '
        f'NUM_LAYERS={self.NUM_LAYERS}'
      )
    if self.NORM_POLICY != 'primer_hybrid':
      raise UserError(
        f'blocks of {type(self).__name__} need NORM_POLICY=primer_hybrid, not {self.NORM_POLICY}'
      )

  def block(self) -> fdl.Partial:
    return template(
      ScaledBlock, norm_tpl=self.norm(), post_norm_tpl=self.norm(), attention_tpl=self.attention(),
      ffn_tpl=self.feed_forward(self.HIDDEN_DIMS), dropout=self.DROPOUT_PROB,
    )  # fmt: skip

  def block_of(self, kind: BlockKind) -> fdl.Partial:
    block = super().block_of(kind)
    if kind.has_experts:
      experts = self.experts()
      experts.norm_tpl = self.norm()
      block.ffn_sees_residual = True
      block.ffn_tpl = template(
        NormedExperts, experts_tpl=experts,
        shared_tpl=self.feed_forward(self.shared_hidden_dims_of(kind)), norm_tpl=self.norm(),
      )  # fmt: skip
    return block

  def router(self) -> fdl.Partial:
    return template(ScaledRouter, top_k=self.NUM_EXPERTS_PER_TOKEN, epsilon=self.LAYERNORM_EPSILON)


@register
class Gemma4_31B(Gemma4):
  """30,697,345,340 parameters: the text model of gemma-4-31B."""

  NUM_LAYERS = 60
  NUM_DENSE_BLOCKS = 60
  NUM_HEADS = 32
  NUM_KV_HEADS = 16
  FULL_KV_HEADS = 4
  KEYS_ARE_VALUES = True
  MODEL_DIMS = 5376
  HIDDEN_DIMS = 21504
  ICI_MESH_SHAPE = [1, 8, 1]
  DCN_MESH_SHAPE = [1, 2, 1]


@register
class Gemma4_26B_A4B(Gemma4):
  """25,233,141,790 parameters: the text model of gemma-4-26B-A4B, with experts."""

  NUM_LAYERS = 30
  NUM_HEADS = 16
  NUM_KV_HEADS = 8
  FULL_KV_HEADS = 2
  KEYS_ARE_VALUES = True
  MODEL_DIMS = 2816
  HIDDEN_DIMS = 2112
  EXPERT_HIDDEN_DIMS = 704
  ICI_MESH_SHAPE = [1, 8, 1]
  DCN_MESH_SHAPE = [1, 2, 1]


@register
class Gemma4E2B(Gemma4):
  """4,628,569,379 parameters: the text model of gemma-4-E2B.

  The sizes are those of text_config in the published config.json. Of the parameters, 2,348,810,240
  are the table of the blocks' embeddings.
  """

  NUM_LAYERS = 35
  NUM_DENSE_BLOCKS = 35
  NUM_HEADS = 8
  NUM_KV_HEADS = 1
  MODEL_DIMS = 1536
  HIDDEN_DIMS = 6144
  SLIDING_WINDOW = 512
  ATTENTION_PATTERN: list[AttentionKind] = ['sliding', 'sliding', 'sliding', 'sliding', 'full']
  PER_LAYER_EMBEDDING_DIMS = 256
  NUM_KV_SHARED_LAYERS = 20
  KV_SHARED_HIDDEN_DIMS = 12288
  ICI_MESH_SHAPE = [1, 8, 1]


@register
class Gemma4E4B(Gemma4):
  """7,463,013,418 parameters: the text model of gemma-4-E4B.

  The sizes are those of text_config in the published config.json. Of the parameters, 2,818,572,288
  are the table of the blocks' embeddings.
  """

  NUM_LAYERS = 42
  NUM_DENSE_BLOCKS = 42
  NUM_HEADS = 8
  NUM_KV_HEADS = 2
  MODEL_DIMS = 2560
  HIDDEN_DIMS = 10240
  SLIDING_WINDOW = 512
  PER_LAYER_EMBEDDING_DIMS = 256
  NUM_KV_SHARED_LAYERS = 18
  ICI_MESH_SHAPE = [1, 8, 1]
