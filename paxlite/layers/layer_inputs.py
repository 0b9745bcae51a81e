"""Inputs of the blocks beside the activations, as the per-layer embeddings of Gemma 3n and 4."""

import math

import jax
from flax import linen as nn

from paxlite.config.templates import Template, template_field
from paxlite.layers.embeddings import TokenEmbedding
from paxlite.layers.language_model import TransformerLm
from paxlite.layers.norms import RmsNorm
from paxlite.layers.projection import Projection
from paxlite.parallel.partitioning import shard


class LayerInputs(nn.Module):
  """(norm(w·x / √D) + table[ids]) / √2: inputs [B, T, L, P] of L blocks.

  Each block has a slice of the table of its own, and one of w.

  Attributes:
    model_dims: D.
    num_layers: L.
    input_dims: P.
    table_tpl: The table [V, L·P], a TokenEmbedding.
    projection_tpl: The product with w [D, L, P].
    norm_tpl: The norm over P.
  """

  model_dims: int
  num_layers: int
  input_dims: int
  table_tpl: Template = template_field(TokenEmbedding)
  projection_tpl: Template = template_field(Projection)
  norm_tpl: Template = template_field(RmsNorm)

  @nn.compact
  def __call__(self, ids_BT: jax.Array, x_BTD: jax.Array) -> jax.Array:
    """Maps token ids [B, T] and their embeddings [B, T, D] to the inputs [B, T, L, P]."""
    layers = self.num_layers, self.input_dims
    axes = 'outer_batch', 'length', None, 'act_mlp'
    projected_BTLP = self.projection_tpl(
      equation='BTD,DLP->BTLP',
      shape=(self.model_dims, *layers),
      axes=('embed', None, 'mlp'),
      name='projection',
    )(x_BTD)
    projected_BTLP = shard(projected_BTLP / math.sqrt(self.model_dims), *axes)
    normed_BTLP = self.norm_tpl(name='norm')(projected_BTLP)
    # of whole rows first: a slice of a block does not lie on one device otherwise
    table_BTE = shard(self.table_tpl(name='table')(ids_BT), 'outer_batch', 'length', None)
    table_BTLP = shard(table_BTE.reshape(*ids_BT.shape, *layers), *axes)
    inputs_BTLP: jax.Array = (normed_BTLP + table_BTLP) / math.sqrt(2)
    return inputs_BTLP


class LayerInputLm(TransformerLm):
  """A language model whose stack, a LinkedTransformer, has inputs of its blocks.

  Attributes:
    layer_inputs_tpl: Computes them from token ids and embeddings, as LayerInputs.
  """

  layer_inputs_tpl: Template = template_field(LayerInputs)

  def setup(self) -> None:
    super().setup()
    self.layer_inputs = self.layer_inputs_tpl()

  @nn.nowrap
  def stack_inputs(self, ids_BT: jax.Array, x_BTD: jax.Array) -> tuple[jax.Array, ...]:
    return (self.layer_inputs(ids_BT, x_BTD),)
