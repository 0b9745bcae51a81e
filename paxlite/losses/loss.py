"""A term of the loss of a step: a sum over what a batch holds, and the weight of this sum."""

import abc
import dataclasses
from collections.abc import Collection, Mapping
from typing import ClassVar

import jax

from paxlite.losses.metrics import Batch, Weighted
from paxlite.losses.outputs import Outputs


@dataclasses.dataclass(frozen=True)
class Loss(abc.ABC):
  """A term of the loss. A subclass returns its sum over a batch, and may return metrics.

  The task adds up coefficient · Σ sum / Σ weight over its losses. Both sums are over the whole
  batch of a step, or over all batches of an evaluation. So the number of microbatches does not
  change the loss, if it is a sum over rows or tokens.
  """

  coefficient: float = 1.0  # what the mean is multiplied by

  reads_params: ClassVar[bool] = False
  """Whether the sum depends on `outputs.params`, and not only on what the model returns."""

  label: ClassVar[str | None] = None
  """What the terminal calls the mean; None: its name, '': it does not show it."""

  larger_is_better: ClassVar[Collection[str]] = ()
  """Names of metrics of which a larger value is better, for BEST_METRIC."""

  shown: ClassVar[Mapping[str, str]] = {}
  """Formats of metrics that the terminal shows after an evaluation, by their names."""

  followed: ClassVar[Mapping[str, str]] = {}
  """Formats of metrics that the lines of training steps show and metrics.jsonl has, by names."""

  @abc.abstractmethod
  def __call__(self, outputs: Outputs, batch: Batch) -> jax.Array:
    """Returns the sum, a float32 scalar.

    Args:
      outputs: What the model makes of the batch.
      batch: Arrays [B, T] named ids, labels and weights, and further ones [B, T, …].
    """

  def weight(self, batch: Batch) -> jax.Array:
    """Returns the weight of the sum, a scalar: the number of target tokens. 0: it does not count.

    It depends on the batch alone, so that it is known for all microbatches before the first one.
    """
    return batch['weights'].sum()

  def metrics(self, outputs: Outputs, batch: Batch) -> Mapping[str, Weighted | jax.Array]:
    """Returns metrics by name. A metric that is a bare scalar has the weight of the loss."""
    return {}

  def of_evaluation(
    self, mean: float, weight: float, metrics: Mapping[str, float], bytes_per_token: float | None
  ) -> dict[str, float]:
    """Returns metrics of a whole evaluation.

    Args:
      mean: The mean of this loss.
      metrics: All other metrics.
      bytes_per_token: Of the text that was evaluated; None if it is not known.
    """
    return {}


@dataclasses.dataclass(frozen=True)
class OnceABatch(Loss):
  """A term that is no mean over tokens: the mean of its values for the microbatches."""

  def weight(self, batch: Batch) -> jax.Array:
    return jax.numpy.ones(())
