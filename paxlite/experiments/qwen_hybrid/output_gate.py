"""A gate of what the heads of attention read."""

import jax
from flax import linen as nn

from paxlite.config.templates import Template, template_field
from paxlite.layers.projection import Projection, to_heads


class OutputGate(nn.Module):
  """σ(w·x), [B, T, D] to [B, T, N, H]: one factor for each number that a head reads.

  See https://arxiv.org/abs/2505.06708.
  """

  model_dims: int  # D
  num_heads: int  # N
  head_dim: int  # H
  projection_tpl: Template = template_field(Projection)  # computes w·x

  @nn.compact
  def __call__(self, x_BTD: jax.Array) -> jax.Array:
    shape = (self.model_dims, self.num_heads, self.head_dim)
    return jax.nn.sigmoid(to_heads(self.projection_tpl, 'projection', x_BTD, shape))
