"""Layers that are made of different blocks."""

from collections.abc import Sequence

import jax
from flax import linen as nn

from paxlite.config.templates import Template


class BlockSequence(nn.Module):
  """A sequence of different blocks, which a stack repeats as one layer.

  A layer of GLaM, for example, is a block with experts followed by a block without.
  """

  # templates of the blocks, whose parameters are x_layers_0, x_layers_1 …
  block_tpls: Sequence[Template]

  @nn.compact
  def __call__(
    self,
    x_BTD: jax.Array,
    positions_BT: jax.Array,
    segment_ids_BT: jax.Array | None,
    *inputs: jax.Array,
  ) -> jax.Array:
    for i, block_tpl in enumerate(self.block_tpls):
      x_BTD = block_tpl(name=f'x_layers_{i}')(x_BTD, positions_BT, segment_ids_BT, *inputs)
    return x_BTD
