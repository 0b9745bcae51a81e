"""Blocks as those of Gemma 4, whose output has a factor, with experts beside a dense layer."""

import jax
from flax import linen as nn

from paxlite.config.templates import Template, template_field
from paxlite.core.variable_names import FIXED
from paxlite.layers.feedforward import FeedForward
from paxlite.layers.norms import RmsNorm
from paxlite.layers.transformer import TransformerBlock
from paxlite.parallel.partitioning import param


class ScaledBlock(TransformerBlock):
  """A TransformerBlock whose output is multiplied by one number, [B, T, D] to [B, T, D].

  The number, fixed_scale [1], is 1 at first. Training leaves it as it is.

  Attributes:
    ffn_sees_residual: Whether the feed-forward layer is called with (norm(x), paddings, x), as
      NormedExperts is, and otherwise with (norm(x), paddings).
  """

  ffn_sees_residual: bool = False

  @nn.compact
  def __call__(
    self, x_BTD: jax.Array, positions_BT: jax.Array, segment_ids_BT: jax.Array | None
  ) -> jax.Array:
    return self.scaled(super().__call__(x_BTD, positions_BT, segment_ids_BT))

  @nn.nowrap
  def scaled(self, x_BTD: jax.Array) -> jax.Array:
    """Returns activations times the block's number."""
    scale = param(self, FIXED, nn.initializers.ones, [1], [None])
    return x_BTD * jax.lax.stop_gradient(scale).astype(x_BTD.dtype)

  def fed_forward(self, x_BTD: jax.Array, paddings_BT: jax.Array | None) -> jax.Array:
    if not self.ffn_sees_residual:
      return super().fed_forward(x_BTD, paddings_BT)
    h_BTD = x_BTD if self.norm_tpl is None else self.norm_tpl(name='ff_layer_norm')(x_BTD)
    out_BTD: jax.Array = self.ffn_tpl(name='ff_layer')(h_BTD, paddings_BT, x_BTD)
    return out_BTD


class NormedExperts(nn.Module):
  """y = norm(shared(h)) + norm(experts(x)), [B, T, D]: a dense layer and experts, side by side.

  Attributes:
    shared_tpl: A FeedForward, which sees what the norm before it has made of the residual stream.
    experts_tpl: A MoeFeedForward, which sees the residual stream itself.
    norm_tpl: The norm of the output of either.
  """

  experts_tpl: Template
  shared_tpl: Template = template_field(FeedForward)
  norm_tpl: Template = template_field(RmsNorm)

  @nn.compact
  def __call__(
    self, h_BTD: jax.Array, paddings_BT: jax.Array | None, x_BTD: jax.Array
  ) -> jax.Array:
    shared_BTD = self.shared_tpl(name='shared')(h_BTD, paddings_BT)
    y_BTD = self.experts_tpl(name='experts')(x_BTD, paddings_BT)
    normed_BTD: jax.Array = self.norm_tpl(name='shared_norm')(shared_BTD)
    return normed_BTD + self.norm_tpl(name='experts_norm')(y_BTD)
