"""Full attention whose heads have another width than those of sliding attention."""

from typing import Self

import fiddle as fdl

from paxlite.config.attribute_kinds import Count, Fraction, Function, Shape
from paxlite.config.templates import template
from paxlite.core.errors import UserError
from paxlite.experiments.language_model import LanguageModel
from paxlite.experiments.parts.attention import AttentionKind
from paxlite.experiments.parts.stack import BlockKind
from paxlite.layers.attention.attention import SharedKeyValue
from paxlite.layers.attention.attention_case import Case
from paxlite.layers.norms import UnscaledRmsNorm
from paxlite.layers.rotary import ProportionalRotaryEmbedding

_FULL = ('full', 'full_nope')


class WideAttention(LanguageModel, subject='Attention'):
  """A LanguageModel with sliding and full attention that have heads of their own, as Gemma 4."""

  KEYS_ARE_VALUES: Shape[bool] = (
    False  # full attention has no weight of values: they are its keys, before norm and positions
  )
  USE_VALUE_NORM: Function[bool] = False  # norm of the values of each head, without a scale
  FULL_ROPE_SHARE: Function[Fraction] = (
    1.0  # share of the pairs that RoPE rotates in full attention; the first ones
  )

  @property
  def FULL_DIMS_PER_HEAD(self) -> Shape[Count]:
    """Width of a head of full attention."""
    return self.DIMS_PER_HEAD

  @property
  def FULL_KV_HEADS(self) -> Shape[Count]:
    """Heads of keys and values of full attention."""
    return self.NUM_KV_HEADS

  @property
  def of_full_attention(self) -> Self:
    """The same experiment, in which all attention has the heads of full attention."""
    return self.replaced(
      DIMS_PER_HEAD=self.FULL_DIMS_PER_HEAD,
      NUM_KV_HEADS=self.FULL_KV_HEADS,
      FULL_DIMS_PER_HEAD=self.FULL_DIMS_PER_HEAD,
      FULL_KV_HEADS=self.FULL_KV_HEADS,
      HEADS_SPAN_MODEL=False,
    )

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
        f'FULL_ROPE_SHARE={self.FULL_ROPE_SHARE:g} needs positions that are not stretched, and '
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
      ProportionalRotaryEmbedding,
      theta=self.ROPE_THETA,
      layout=self.ROPE_LAYOUT,
      share=self.FULL_ROPE_SHARE,
    )

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
        SharedKeyValue,
        model_dims=self.MODEL_DIMS,
        num_heads=self.NUM_HEADS,
        num_kv_heads=self.FULL_KV_HEADS,
        head_dim=self.FULL_DIMS_PER_HEAD,
      )
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
