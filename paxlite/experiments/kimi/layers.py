"""Kimi Delta Attention, a delta rule with a decay for each channel: https://arxiv.org/abs/2510.26692."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from paxlite.config.templates import Template, template_field
from paxlite.experiments.hybrid.attend import attend
from paxlite.experiments.hybrid.causal_convolution import CausalConvolution
from paxlite.experiments.hybrid.decay import rates_up_to, step_biases
from paxlite.experiments.hybrid.gated_delta_net import unit_length
from paxlite.experiments.hybrid.gated_norm import GatedRmsNorm
from paxlite.experiments.hybrid.row_state import RowState
from paxlite.layers.activations import ACTIVATIONS
from paxlite.layers.projection import Projection, per_head, to_heads, to_output
from paxlite.parallel.partitioning import param, shard


class ChannelDecay(nn.Module):
  """−exp(log_rate) · softplus(x + bias), [B, T, N, K] to float32 [B, T, N, K].

  The factors are those of the channels of a head, with a bias for each channel and one rate for
  each head (https://arxiv.org/abs/2510.26692, section 4). Initial values are those of Decay.
  """

  largest_rate: float = 16.0  # the largest initial rate

  @nn.compact
  def __call__(self, x_BTNK: jax.Array) -> jax.Array:
    heads = x_BTNK.shape[2:]
    rates = rates_up_to(self.largest_rate)
    log_rate_N = param(self, 'log_rate', rates, heads[:1], ['heads']).astype(jnp.float32)
    bias_NK = param(self, 'bias', step_biases, heads, ['heads', 'head_dim']).astype(jnp.float32)
    steps_BTNK = jax.nn.softplus(x_BTNK.astype(jnp.float32) + bias_NK)
    return -jnp.exp(log_rate_N)[:, None] * steps_BTNK


class SigmoidGatedRmsNorm(GatedRmsNorm):
  """scale · x / √(mean(x²) + epsilon) · σ(gate), [..., H] to [..., H], in float32."""

  def factor(self, gate: jax.Array) -> jax.Array:
    return jax.nn.sigmoid(gate)


class KimiDeltaAttention(nn.Module):
  """N heads with states [H, H], [B, T, D] to [B, T, D].

  Queries, keys and values pass a short convolution and an activation. Queries and keys have
  length 1. The inputs of decays and gates pass a vector of H numbers that all heads share. What the
  heads read from their states is normed, gated, and projected.
  """

  model_dims: int  # D
  num_heads: int  # N
  head_dims: int  # H
  activation: str = 'silu'  # a key of ACTIVATIONS, of what the convolutions compute
  projection_tpl: Template = template_field(Projection)  # template of all projections
  # the convolutions of queries, keys and values
  convolution_tpl: Template = template_field(CausalConvolution)
  # computes the logarithms of the factors of the states
  decay_tpl: Template = template_field(ChannelDecay)
  norm_tpl: Template = template_field(SigmoidGatedRmsNorm)  # the gated norm of what is read

  @nn.compact
  def __call__(
    self, x_BTD: jax.Array, positions_BT: jax.Array, segment_ids_BT: jax.Array | None = None
  ) -> jax.Array:
    rows = RowState(self, *x_BTD.shape[:2])
    shape = (self.model_dims, self.num_heads, self.head_dims)

    def inputs(name: str) -> jax.Array:
      y_BTNH = checkpoint_name(to_heads(self.projection_tpl, name, x_BTD, shape), f'{name}_proj')
      convolution = self.convolution_tpl(axes=('heads', 'head_dim'), name=f'{name}_convolution')
      return ACTIVATIONS[self.activation](convolution(y_BTNH, segment_ids_BT, rows, name))

    query = unit_length(inputs('query')) * self.head_dims**-0.5
    key, value = unit_length(inputs('key')), inputs('value')
    log_decay = self.decay_tpl(name='decay')(self._narrowed('decay', x_BTD))
    beta = per_head(self.projection_tpl, 'beta', x_BTD, (self.model_dims, self.num_heads))
    beta = jax.nn.sigmoid(beta.astype(jnp.float32))

    context = attend(rows, query, key, value, log_decay, beta, segment_ids_BT)
    context = checkpoint_name(context, 'context')
    context = self.norm_tpl(name='norm')(context, self._narrowed('gate', x_BTD))
    context = shard(context, 'batch', 'length', 'act_heads', None)
    return to_output(self.projection_tpl, context, shape)

  def _narrowed(self, name: str, x_BTD: jax.Array) -> jax.Array:
    """Returns a projection to [B, T, N, H] by way of H numbers."""
    down = self.projection_tpl(
      equation='BTD,DR->BTR', shape=(self.model_dims, self.head_dims), axes=('embed', None),
      name=f'{name}_down',
    )  # fmt: skip
    shape = (self.head_dims, self.num_heads, self.head_dims)
    return to_heads(self.projection_tpl, f'{name}_up', down(x_BTD), shape)
