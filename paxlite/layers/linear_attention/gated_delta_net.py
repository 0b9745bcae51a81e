"""Linear attention with a delta rule and decay: https://arxiv.org/abs/2412.06464."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from paxlite.config.templates import Template, template_field
from paxlite.layers.activations import ACTIVATIONS
from paxlite.layers.linear_attention.attend import attend
from paxlite.layers.linear_attention.causal_convolution import CausalConvolution
from paxlite.layers.linear_attention.decay import Decay
from paxlite.layers.linear_attention.gated_norm import GatedRmsNorm
from paxlite.layers.linear_attention.row_state import RowState
from paxlite.layers.projection import Projection
from paxlite.parallel.partitioning import shard


class GatedDeltaNet(nn.Module):
  """Queries and keys of N heads, values of M ≥ N heads, [B, T, D] to [B, T, D].

  Queries, keys and values pass a short convolution and an activation. Queries and keys have
  length 1. What the heads of values read from their states is normed, gated, and projected.

  Attributes:
    model_dims: D.
    num_key_heads: N.
    num_value_heads: M; M / N neighboring heads of values share a head of keys.
    key_dims: K, the width of a head of keys.
    value_dims: V, the width of a head of values.
    beta_scale: The largest share of a key's old value that is replaced. With 2, a state can change
      its sign (https://arxiv.org/abs/2411.12537).
    activation: A key of ACTIVATIONS, of what the convolutions compute.
    projection_tpl: Template of all projections.
    convolution_tpl: The convolutions of queries, keys and values.
    decay_tpl: Computes the logarithms of the factors of the states.
    norm_tpl: The gated norm of what is read.
  """

  model_dims: int
  num_key_heads: int
  num_value_heads: int
  key_dims: int
  value_dims: int
  beta_scale: float = 1.0
  activation: str = 'silu'
  projection_tpl: Template = template_field(Projection)
  convolution_tpl: Template = template_field(CausalConvolution)
  decay_tpl: Template = template_field(Decay)
  norm_tpl: Template = template_field(GatedRmsNorm)

  @nn.compact
  def __call__(
    self, x_BTD: jax.Array, positions_BT: jax.Array, segment_ids_BT: jax.Array | None = None
  ) -> jax.Array:
    rows = RowState(self, *x_BTD.shape[:2])

    def inputs(name: str, heads: int, width: int, axis: str) -> jax.Array:
      y_BTNH = self._project(name, (heads, width), axis)(x_BTD)
      y_BTNH = checkpoint_name(y_BTNH, f'{name}_proj')
      convolution = self.convolution_tpl(axes=(axis, 'head_dim'), name=f'{name}_convolution')
      return ACTIVATIONS[self.activation](convolution(y_BTNH, segment_ids_BT, rows, name))

    query = unit_length(inputs('query', self.num_key_heads, self.key_dims, 'kv_heads'))
    query *= self.key_dims**-0.5
    key = unit_length(inputs('key', self.num_key_heads, self.key_dims, 'kv_heads'))
    value = inputs('value', self.num_value_heads, self.value_dims, 'heads')
    log_decay = self.decay_tpl(name='decay')(self._per_head('decay_input')(x_BTD))
    beta = jax.nn.sigmoid(self._per_head('beta')(x_BTD).astype(jnp.float32)) * self.beta_scale

    shares = self.num_value_heads // self.num_key_heads
    query, key = (jnp.repeat(x, shares, 2) for x in (query, key))
    context = attend(rows, query, key, value, log_decay, beta, segment_ids_BT)
    context = checkpoint_name(context, 'context')

    gate = self._project('gate', (self.num_value_heads, self.value_dims), 'heads')(x_BTD)
    context = self.norm_tpl(name='norm')(context, gate)
    context = shard(context, 'batch', 'length', 'act_heads', None)
    out_BTD = self.projection_tpl(
      equation='BTNH,DNH->BTD',
      shape=(self.model_dims, self.num_value_heads, self.value_dims),
      axes=('embed', 'heads', 'head_dim'),
      name='post',
    )(context)
    return checkpoint_name(shard(out_BTD, 'batch', 'residual_length', 'act_embed'), 'out_proj')

  def _project(self, name: str, shape: tuple[int, int], axis: str) -> nn.Module:
    return self.projection_tpl(
      equation='BTD,DNH->BTNH',
      shape=(self.model_dims, *shape),
      axes=('embed', axis, 'head_dim'),
      name=name,
    )

  def _per_head(self, name: str) -> nn.Module:
    """A projection to one number for each head of values."""
    return self.projection_tpl(
      equation='BTD,DN->BTN',
      shape=(self.model_dims, self.num_value_heads),
      axes=('embed', 'heads'),
      name=name,
    )


def unit_length(x: jax.Array, epsilon: float = 1e-6) -> jax.Array:
  """Returns x / √(Σ x² + epsilon) over the last dimension."""
  x32 = x.astype(jnp.float32)
  return (x32 * jax.lax.rsqrt(jnp.square(x32).sum(-1, keepdims=True) + epsilon)).astype(x.dtype)
