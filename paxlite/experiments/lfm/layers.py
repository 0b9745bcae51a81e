"""A short convolution between two gates, the layer of LFM2 that stands in for attention."""

import jax
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from paxlite.config.templates import Template, template_field
from paxlite.experiments.hybrid.causal_convolution import CausalConvolution
from paxlite.experiments.hybrid.row_state import RowState
from paxlite.layers.projection import Projection
from paxlite.parallel.partitioning import shard


class ShortConvolution(nn.Module):
  """y = W · (C ⊙ convolution(B ⊙ x)), [B, T, D] to [B, T, D], each of B, C and x a projection.

  The formula is that of LFM2 in transformers, whose names are B, C and x. Here they are gate, after
  and value.
  """

  model_dims: int  # D, which is also the number of channels
  projection_tpl: Template = template_field(Projection)  # template of all projections
  # the convolution of each channel over the tokens
  convolution_tpl: Template = template_field(CausalConvolution)

  @nn.compact
  def __call__(
    self, x_BTD: jax.Array, positions_BT: jax.Array, segment_ids_BT: jax.Array | None = None
  ) -> jax.Array:
    rows = RowState(self, *x_BTD.shape[:2])

    def inputs(name: str) -> jax.Array:
      projection = self.projection_tpl(
        equation='BTD,DF->BTF', shape=(self.model_dims, self.model_dims), axes=('embed', 'mlp'),
        name=name,
      )  # fmt: skip
      return checkpoint_name(projection(x_BTD), f'{name}_proj')

    gate_BTF, after_BTF = inputs('gate'), inputs('after')
    # a token needs those before it, so that tokens are not split over devices
    h_BTF = shard(gate_BTF * inputs('value'), 'batch', None, 'act_mlp')
    convolution = self.convolution_tpl(axes=('mlp',), name='convolution')
    h_BTF = after_BTF * convolution(h_BTF, segment_ids_BT, rows, 'channels')
    h_BTF = checkpoint_name(shard(h_BTF, 'batch', 'length', 'act_mlp'), 'context')
    out_BTD = self.projection_tpl(
      equation='BTF,DF->BTD', shape=(self.model_dims, self.model_dims), axes=('embed', 'mlp'),
      name='post',
    )(h_BTF)  # fmt: skip
    return checkpoint_name(shard(out_BTD, 'batch', 'residual_length', 'act_embed'), 'out_proj')
