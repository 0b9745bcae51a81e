"""The losses and summaries of layers, such as those that balance experts."""

import dataclasses
from collections.abc import Mapping

import jax

from paxlite.layers.sown import over_layers, total_loss
from paxlite.losses.loss import OnceABatch
from paxlite.losses.metrics import Batch, Weighted, num_tokens
from paxlite.losses.outputs import Outputs


@dataclasses.dataclass(frozen=True)
class SownLosses(OnceABatch):
  """The sum of the loss terms of all layers, and their summaries as metrics: see layers/sown.py."""

  label = ''

  def __call__(self, outputs: Outputs, batch: Batch) -> jax.Array:
    return total_loss(outputs.sown)

  def metrics(self, outputs: Outputs, batch: Batch) -> Mapping[str, Weighted]:
    tokens = num_tokens(batch)
    return {name: Weighted(x, tokens) for name, x in over_layers(outputs.sown).items()}
