"""Linear attention with a delta rule and decay: https://arxiv.org/abs/2412.06464."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from paxlite.config.templates import Template, template_field
from paxlite.experiments.hybrid.attend import attend
from paxlite.experiments.hybrid.causal_convolution import CausalConvolution
from paxlite.experiments.hybrid.decay import Decay
from paxlite.experiments.hybrid.gated_norm import GatedRmsNorm
from paxlite.experiments.hybrid.row_state import RowState
from paxlite.layers.activations import ACTIVATIONS
from paxlite.layers.projection import Projection, per_head, to_heads, to_output
from paxlite.parallel.partitioning import shard


class GatedDeltaNet(nn.Module):
  """Queries and keys of N heads, values of M ≥ N heads, [B, T, D] to [B, T, D].

  Queries, keys and values pass a short convolution and an activation. Queries and keys have
  length 1. What the heads of values read from their states is normed, gated, and projected.
  """

  model_dims: int  # D
  num_key_heads: int  # N
  num_value_heads: int  # M; M / N neighboring heads of values share a head of keys
  key_dims: int  # K, the width of a head of keys
  value_dims: int  # V, the width of a head of values
  # The largest share of a key's old value that is replaced. With 2, a state can change its sign
  # (https://arxiv.org/abs/2411.12537).
  beta_scale: float = 1.0
  activation: str = 'silu'  # a key of ACTIVATIONS, of what the convolutions compute
  projection_tpl: Template = template_field(Projection)  # template of all projections
  # the convolutions of queries, keys and values
  convolution_tpl: Template = template_field(CausalConvolution)
  # computes the logarithms of the factors of the states
  decay_tpl: Template = template_field(Decay)
  norm_tpl: Template = template_field(GatedRmsNorm)  # the gated norm of what is read

  @nn.compact
  def __call__(
    self, x_BTD: jax.Array, positions_BT: jax.Array, segment_ids_BT: jax.Array | None = None
  ) -> jax.Array:
    rows = RowState(self, *x_BTD.shape[:2])

    def inputs(name: str, heads: int, width: int, axis: str) -> jax.Array:
      shape = (self.model_dims, heads, width)
      y_BTNH = to_heads(self.projection_tpl, name, x_BTD, shape, axis)
      y_BTNH = checkpoint_name(y_BTNH, f'{name}_proj')
      convolution = self.convolution_tpl(axes=(axis, 'head_dim'), name=f'{name}_convolution')
      return ACTIVATIONS[self.activation](convolution(y_BTNH, segment_ids_BT, rows, name))

    query = unit_length(inputs('query', self.num_key_heads, self.key_dims, 'kv_heads'))
    query *= self.key_dims**-0.5
    key = unit_length(inputs('key', self.num_key_heads, self.key_dims, 'kv_heads'))
    value = inputs('value', self.num_value_heads, self.value_dims, 'heads')
    of_values = (self.model_dims, self.num_value_heads)
    decay_input = per_head(self.projection_tpl, 'decay_input', x_BTD, of_values)
    log_decay = self.decay_tpl(name='decay')(decay_input)
    beta = per_head(self.projection_tpl, 'beta', x_BTD, of_values)
    beta = jax.nn.sigmoid(beta.astype(jnp.float32)) * self.beta_scale

    shares = self.num_value_heads // self.num_key_heads
    query, key = (jnp.repeat(x, shares, 2) for x in (query, key))
    context = attend(rows, query, key, value, log_decay, beta, segment_ids_BT)
    context = checkpoint_name(context, 'context')

    shape = (self.model_dims, self.num_value_heads, self.value_dims)
    gate = to_heads(self.projection_tpl, 'gate', x_BTD, shape)
    context = self.norm_tpl(name='norm')(context, gate)
    context = shard(context, 'batch', 'length', 'act_heads', None)
    return to_output(self.projection_tpl, context, shape)


def unit_length(x: jax.Array, epsilon: float = 1e-6) -> jax.Array:
  """Returns x / √(Σ x² + epsilon) over the last dimension."""
  x32 = x.astype(jnp.float32)
  return (x32 * jax.lax.rsqrt(jnp.square(x32).sum(-1, keepdims=True) + epsilon)).astype(x.dtype)
