"""Experts whose activation has limited arguments, as in DeepSeek-V4."""

from collections.abc import Callable

import jax

from paxlite.layers.activations import gate_within
from paxlite.layers.moe.moe import MoeFeedForward


class LimitedExperts(MoeFeedForward):
  """A MoeFeedForward whose experts are gated, with limited arguments; see gate_within.

  Attributes:
    limit: The limit.
  """

  limit: float = 10.0

  @property
  def activate(self) -> Callable[..., jax.Array]:
    return gate_within(self.activation, self.limit)
