"""Mamba 2, a state space with one decay for each head: https://arxiv.org/abs/2405.21060."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from paxlite.config.templates import Template, template_field
from paxlite.experiments.hybrid.attend import attend
from paxlite.experiments.hybrid.causal_convolution import CausalConvolution
from paxlite.experiments.hybrid.decay import Steps
from paxlite.experiments.hybrid.gated_norm import GateThenRmsNorm
from paxlite.experiments.hybrid.row_state import RowState
from paxlite.layers.activations import ACTIVATIONS
from paxlite.layers.projection import Projection, per_head, to_heads, to_output
from paxlite.parallel.partitioning import param, shard


class Mamba2(nn.Module):
  """N heads with states [S, P], [B, T, D] to [B, T, D].

  The values x, and the keys and queries, which the paper calls B and C, pass a short convolution
  and an activation. A token writes δ · key ⊗ x to a state, and reads it with its query. To that,
  skip · x is added. The sum is gated, normed, and projected.
  """

  model_dims: int  # D
  num_heads: int  # N
  head_dims: int  # P, the width of a head
  num_groups: int  # G; N / G neighboring heads share keys and queries
  state_dims: int  # S, the width of keys and queries
  activation: str = 'silu'  # a key of ACTIVATIONS, of what the convolutions compute
  projection_tpl: Template = template_field(Projection)  # template of all projections
  # factors of what the projections of the input compute, which is called with the name of a
  # projection and its result; None means none
  factors_tpl: Template | None = None
  # the convolutions of values, keys and queries
  convolution_tpl: Template = template_field(CausalConvolution)
  # computes δ and the logarithms of the factors of the states
  steps_tpl: Template = template_field(Steps)
  norm_tpl: Template = template_field(GateThenRmsNorm)  # gates and norms what is read

  @nn.compact
  def __call__(
    self, x_BTD: jax.Array, positions_BT: jax.Array, segment_ids_BT: jax.Array | None = None
  ) -> jax.Array:
    rows = RowState(self, *x_BTD.shape[:2])
    of_heads, of_groups = (self.num_heads, self.head_dims), (self.num_groups, self.state_dims)
    scaled = lambda _, y: y
    if self.factors_tpl is not None:
      scaled = self.factors_tpl(name='factors')

    def project(name: str, shape: tuple[int, int], axis: str) -> jax.Array:
      y_BTNH = to_heads(self.projection_tpl, name, x_BTD, (self.model_dims, *shape), axis)
      return checkpoint_name(scaled(name, y_BTNH), f'{name}_proj')

    def inputs(name: str, shape: tuple[int, int], axis: str) -> jax.Array:
      y_BTNH = project(name, shape, axis)
      convolution = self.convolution_tpl(axes=(axis, 'head_dim'), name=f'{name}_convolution')
      return ACTIVATIONS[self.activation](convolution(y_BTNH, segment_ids_BT, rows, name))

    gate = project('gate', of_heads, 'heads')
    value = inputs('value', of_heads, 'heads')
    key, query = (inputs(name, of_groups, 'kv_heads') for name in ('key', 'query'))
    step_BTN = per_head(self.projection_tpl, 'step', x_BTD, (self.model_dims, self.num_heads))
    steps, log_decay = self.steps_tpl(name='steps')(scaled('step', step_BTN))

    key, query = (jnp.repeat(x, self.num_heads // self.num_groups, 2) for x in (key, query))
    written = (value * steps[..., None]).astype(value.dtype)
    context = attend(rows, query, key, written, log_decay, None, segment_ids_BT)
    skip = param(self, 'skip', nn.initializers.ones, [self.num_heads], ['heads'])
    context += (value * skip[:, None]).astype(context.dtype)
    context = self.norm_tpl(name='norm')(checkpoint_name(context, 'context'), gate)
    context = shard(context, 'batch', 'length', 'act_heads', None)
    return to_output(self.projection_tpl, context, (self.model_dims, *of_heads))
