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


class ScaledGatedFeedForward(GatedFeedForward):
  """out · w2·(activation(gate · w_gate·x) ⊙ (w1·x)), as in Falcon-H1.

  Attributes:
    gate_factor: gate.
    output_factor: out.
  """

  gate_factor: float = 1.0
  output_factor: float = 1.0

  @property
  def activate(self) -> Callable[..., jax.Array]:
    gated = gate_by(self.activation)
    return lambda gate, up: gated(scaled(gate, self.gate_factor), up)

  def down(self, hidden_BTF: jax.Array) -> jax.Array:
    return scaled(super().down(hidden_BTF), self.output_factor)
