"""Lightning attention, linear attention whose decay is fixed: https://arxiv.org/abs/2501.08313."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from paxlite.config.templates import Template, template_field
from paxlite.layers.activations import ACTIVATIONS
from paxlite.layers.attention.attention import FullWidthNorm
from paxlite.layers.attention.output_gate import OutputGate
from paxlite.layers.linear_attention.attend import attend
from paxlite.layers.linear_attention.decay import LayerDecay
from paxlite.layers.linear_attention.row_state import RowState
from paxlite.layers.projection import Projection
from paxlite.parallel.partitioning import shard


class LightningAttention(nn.Module):
  """N heads with states [H, H], [B, T, D] to [B, T, D].

  An activation makes queries, keys and values of projections. What the heads read from their states
  is normed over all heads, gated, and projected.

  Attributes:
    model_dims: D.
    num_heads: N.
    head_dims: H.
    activation: A key of ACTIVATIONS.
    projection_tpl: Template of all projections but that of the gate.
    decay_tpl: Returns the logarithms of the factors of the states, [N].
    norm_tpl: The norm of what is read.
    gate_tpl: Computes factors of it from x.
  """

  model_dims: int
  num_heads: int
  head_dims: int
  activation: str = 'silu'
  projection_tpl: Template = template_field(Projection)
  decay_tpl: Template = template_field(LayerDecay)
  norm_tpl: Template = template_field(FullWidthNorm)
  gate_tpl: Template = template_field(OutputGate)

  @nn.compact
  def __call__(
    self, x_BTD: jax.Array, positions_BT: jax.Array, segment_ids_BT: jax.Array | None = None
  ) -> jax.Array:
    rows = RowState(self, *x_BTD.shape[:2])

    def inputs(name: str) -> jax.Array:
      y_BTNH = self.projection_tpl(
        equation='BTD,DNH->BTNH',
        shape=(self.model_dims, self.num_heads, self.head_dims),
        axes=('embed', 'heads', 'head_dim'),
        name=name,
      )(x_BTD)
      return ACTIVATIONS[self.activation](checkpoint_name(y_BTNH, f'{name}_proj'))

    query, key, value = (inputs(name) for name in ('query', 'key', 'value'))
    log_decay_N = self.decay_tpl(name='decay')(self.num_heads)
    log_decay = jnp.broadcast_to(log_decay_N, key.shape[:3])
    context = attend(rows, query, key, value, log_decay, None, segment_ids_BT)
    context = self.norm_tpl(name='norm')(checkpoint_name(context, 'context'))
    context *= self.gate_tpl(name='gate')(x_BTD)
    context = shard(context, 'batch', 'length', 'act_heads', None)
    out_BTD = self.projection_tpl(
      equation='BTNH,DNH->BTD',
      shape=(self.model_dims, self.num_heads, self.head_dims),
      axes=('embed', 'heads', 'head_dim'),
      name='post',
    )(context)
    return checkpoint_name(shard(out_BTD, 'batch', 'residual_length', 'act_embed'), 'out_proj')
