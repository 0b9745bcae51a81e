"""The losses and summaries of layers, such as those that balance experts."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from paxlite.layers.sown import over_layers, total_loss
from paxlite.losses.loss import Loss
from paxlite.losses.metrics import Batch, Weighted, num_tokens
from paxlite.losses.outputs import Outputs


@dataclasses.dataclass(frozen=True)
class SownLosses(Loss):
  """The sum of the loss terms of all layers, and their summaries as metrics: see layers/sown.py.

  The terms of a microbatch count by the share of its positions that are no padding. A balancing
  loss is a product of means, so where microbatches have unlike tokens it depends on their number.
  """

  label = ''

  def __call__(self, outputs: Outputs, batch: Batch) -> jax.Array:
    return total_loss(outputs.sown) * self.weight(batch)

  def weight(self, batch: Batch) -> jax.Array:
    tokens, positions = num_tokens(batch), batch['ids'].size
    # XLA multiplies by 1 / positions, so that the quotient need not be 1
    return jnp.where(tokens == positions, 1.0, tokens / positions)

  def metrics(self, outputs: Outputs, batch: Batch) -> Mapping[str, Weighted]:
    tokens = num_tokens(batch)
    return {name: Weighted(x, tokens) for name, x in over_layers(outputs.sown).items()}
