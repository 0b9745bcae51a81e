"""A gate of what the heads of attention read."""

import jax
from flax import linen as nn

from paxlite.config.templates import Template, template_field
from paxlite.layers.projection import Projection, to_heads


class OutputGate(nn.Module):
  """σ(w·x), [B, T, D] to [B, T, N, H]: one factor for each number that a head reads.

  See https://arxiv.org/abs/2505.06708.

  Attributes:
    model_dims: D.
    num_heads: N.
    head_dim: H.
    projection_tpl: Computes w·x.
  """

  model_dims: int
  num_heads: int
  head_dim: int
  projection_tpl: Template = template_field(Projection)

  @nn.compact
  def __call__(self, x_BTD: jax.Array) -> jax.Array:
    shape = (self.model_dims, self.num_heads, self.head_dim)
    return jax.nn.sigmoid(to_heads(self.projection_tpl, 'projection', x_BTD, shape))
