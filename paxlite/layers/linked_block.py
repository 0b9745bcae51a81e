"""Blocks of a linked stack; see linked_stack."""

import jax
from flax import linen as nn

from paxlite.config.templates import Template
from paxlite.layers.transformer import TransformerBlock


class LinkedBlock(TransformerBlock):
  """A block with its own input and other blocks' keys, [B, T, D] to ([B, T, D], keys).

  Attributes:
    attention_tpl: Attention, which is called with (x, positions, segments, keys) and returns its
      output and its keys, as KVSourceAttention and KVSharedAttention.
    input_tpl: Adds the block's input to the activations, as InputGate; None: there is no input.
  """

  input_tpl: Template | None = None

  @nn.compact
  def __call__(  # type: ignore[override]
    self,
    x_BTD: jax.Array,
    positions_BT: jax.Array,
    segment_ids_BT: jax.Array | None,
    input_BTP: jax.Array | None,
    keys: object,
  ) -> tuple[jax.Array, object]:
    h_BTD = self.before_attention(x_BTD)
    attention = self.attention_tpl(name='self_attention')
    h_BTD, keys = attention(h_BTD, positions_BT, segment_ids_BT, keys)
    x_BTD = self.after_attention(x_BTD, h_BTD, segment_ids_BT)
    if self.input_tpl is not None:
      x_BTD = self.input_tpl(name='layer_input')(x_BTD, input_BTP)
    return self.finished(x_BTD), keys

  @nn.nowrap
  def finished(self, x_BTD: jax.Array) -> jax.Array:
    """Returns the output of the block, from activations with its input."""
    return x_BTD
