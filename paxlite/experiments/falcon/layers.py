"""Layers of Falcon-H1: attention and Mamba 2 on the same input (https://arxiv.org/abs/2507.22448)."""

from collections.abc import Callable

import jax
from flax import linen as nn

from paxlite.config.templates import Template, template_field
from paxlite.experiments.hybrid.mamba2 import Mamba2
from paxlite.layers.activations import gate_by
from paxlite.layers.attention.attention import Attention
from paxlite.layers.feedforward import GatedFeedForward
from paxlite.layers.scales import scaled


class SideBySide(nn.Module):
  """a_out · attention(a_in · x) + s_out · state(s_in · x), [B, T, D] to [B, T, D]."""

  # attention, which is called with (x, positions, segment_ids)
  attention_tpl: Template = template_field(Attention)
  # a layer with a state, which is called in the same way
  state_tpl: Template = template_field(Mamba2)
  attention_factors: tuple[float, float] = (1.0, 1.0)  # a_in and a_out
  state_factors: tuple[float, float] = (1.0, 1.0)  # s_in and s_out

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


class ScaledGatedFeedForward(GatedFeedForward):
  """out · w2·(activation(gate · w_gate·x) ⊙ (w1·x)), as in Falcon-H1."""

  gate_factor: float = 1.0  # gate
  output_factor: float = 1.0  # out

  @property
  def activate(self) -> Callable[..., jax.Array]:
    gated = gate_by(self.activation)
    return lambda gate, up: gated(scaled(gate, self.gate_factor), up)

  def down(self, hidden_BTF: jax.Array) -> jax.Array:
    return scaled(super().down(hidden_BTF), self.output_factor)
