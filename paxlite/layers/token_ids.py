"""Token ids as an input of the blocks, for layers that depend on them."""

import jax
from flax import linen as nn

from paxlite.layers.language_model import TransformerLm


class TokenIdLm(TransformerLm):
  """A language model whose stack, and so each block, is called with the token ids [B, T] too."""

  @nn.nowrap
  def stack_inputs(self, ids_BT: jax.Array, x_BTD: jax.Array) -> tuple[jax.Array, ...]:
    return (ids_BT,)
