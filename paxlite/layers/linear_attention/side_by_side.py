"""Attention and a layer with a state on the same input, as in Falcon-H1 (https://arxiv.org/abs/2507.22448)."""

import jax
from flax import linen as nn

from paxlite.config.templates import Template, template_field
from paxlite.layers.attention.attention import Attention
from paxlite.layers.linear_attention.mamba2 import Mamba2
from paxlite.layers.scales import scaled


class SideBySide(nn.Module):
  """a_out · attention(a_in · x) + s_out · state(s_in · x), [B, T, D] to [B, T, D].

  Attributes:
    attention_tpl: Attention, which is called with (x, positions, segment_ids).
    state_tpl: A layer with a state, which is called in the same way.
    attention_factors: a_in and a_out.
    state_factors: s_in and s_out.
  """

  attention_tpl: Template = template_field(Attention)
  state_tpl: Template = template_field(Mamba2)
  attention_factors: tuple[float, float] = (1.0, 1.0)
  state_factors: tuple[float, float] = (1.0, 1.0)

  @nn.compact
  def __call__(
    self, x_BTD: jax.Array, positions_BT: jax.Array, segment_ids_BT: jax.Array | None = None
  ) -> jax.Array:
    rest = positions_BT, segment_ids_BT
    attention_in, attention_out = self.attention_factors
    state_in, state_out = self.state_factors
    read_BTD = self.attention_tpl(name='attention')(scaled(x_BTD, attention_in), *rest)
    state_BTD = self.state_tpl(name='state')(scaled(x_BTD, state_in), *rest)
    return scaled(read_BTD, attention_out) + scaled(state_BTD, state_out)
