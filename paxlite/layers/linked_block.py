"""Blocks of a linked stack; see linked_stack."""

import jax
from flax import linen as nn

from paxlite.config.templates import Template, template_field
from paxlite.layers.activations import gate_by
from paxlite.layers.norms import RmsNorm
from paxlite.layers.projection import Projection
from paxlite.layers.remat import recomputed
from paxlite.layers.scaled_block import ScaledBlock
from paxlite.layers.transformer import TransformerBlock
from paxlite.parallel.partitioning import shard


class LinkedBlock(TransformerBlock):
  """A block with an input of its own and keys of others, [B, T, D] to ([B, T, D], keys).

  Attributes:
    attention_tpl: Attention, which is called with (x, positions, segments, keys) and returns its
      output and its keys, as GivingAttention and ReadingAttention.
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


class LinkedScaledBlock(LinkedBlock, ScaledBlock):  # type: ignore[misc]
  """The same as a ScaledBlock, whose number is also a factor of what the input adds."""

  @nn.nowrap
  def finished(self, x_BTD: jax.Array) -> jax.Array:
    return self.scaled(x_BTD)


class InputGate(nn.Module):
  """x + norm(w2·(activation(w1·x) ⊙ input)), [B, T, D] and an input [B, T, P] to [B, T, D].

  Attributes:
    model_dims: D.
    input_dims: P.
    activation: A key of ACTIVATIONS.
    projection_tpl: Template of the products with w1 and w2.
    norm_tpl: The norm.
  """

  model_dims: int
  input_dims: int
  activation: str = 'gelu'
  projection_tpl: Template = template_field(Projection)
  norm_tpl: Template = template_field(RmsNorm)

  @nn.compact
  def __call__(self, x_BTD: jax.Array, input_BTP: jax.Array) -> jax.Array:
    D, P = self.model_dims, self.input_dims
    gate_BTP = self.projection_tpl(
      equation='BTD,DP->BTP', shape=(D, P), axes=('embed', 'mlp'), name='gate'
    )(x_BTD)
    h_BTP = recomputed(gate_by(self.activation))(gate_BTP, input_BTP)
    y_BTD = self.projection_tpl(
      equation='BTP,PD->BTD', shape=(P, D), axes=('mlp', 'embed'), name='projection'
    )(shard(h_BTP, 'batch', 'length', 'act_mlp'))
    y_BTD = shard(y_BTD, 'batch', 'residual_length', 'act_embed')
    return shard(x_BTD + self.norm_tpl(name='norm')(y_BTD), 'batch', 'residual_length', 'act_embed')
