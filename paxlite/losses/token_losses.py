"""Losses of next-token prediction, which are means over target tokens."""

import dataclasses
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from paxlite.losses.loss import Loss
from paxlite.losses.metrics import Batch, Weighted
from paxlite.losses.outputs import Outputs


def target_sum(values_BT: jax.Array, batch: Batch) -> jax.Array:
  """Returns the sum of values [B, T], each times the weight of its target."""
  return (values_BT * batch['weights']).sum()


@dataclasses.dataclass(frozen=True)
class CrossEntropy(Loss):
  """−log softmax(logits)[label] in nats, the mean over the targets, with the names of Pax."""

  # Whether it is the mean over all positions (GLaM), padding included, and not over the targets.
  # Rows without any target do not count.
  over_padding: bool = False

  label = 'cross-entropy'
  shown = {
    'bits_per_byte': '{:.3f} bits per byte',
    'fraction_of_correct_next_step_preds': 'accuracy {:.3f}',
    'num_predictions': '{:,.0f} tokens',
  }

  def __call__(self, outputs: Outputs, batch: Batch) -> jax.Array:
    return target_sum(outputs.tokens.xent, batch)

  def weight(self, batch: Batch) -> jax.Array:
    weights_BT = batch['weights']
    if not self.over_padding:
      return weights_BT.sum()
    return (weights_BT.max(1) > 0).sum() * jnp.float32(weights_BT.shape[1])

  def metrics(self, outputs: Outputs, batch: Batch) -> Mapping[str, Weighted]:
    count = batch['weights'].sum()
    xent = Weighted.mean(self(outputs, batch), self.weight(batch))
    return {
      'log_pplx': xent,
      'fraction_of_correct_next_step_preds': Weighted.mean(
        target_sum(outputs.tokens.correct, batch), count
      ),
      'num_predictions': Weighted(count, jnp.ones(())),
    }

  def of_evaluation(
    self, mean: float, weight: float, metrics: Mapping[str, float], bytes_per_token: float | None
  ) -> dict[str, float]:
    """Returns the bits per byte of the text, if its number of bytes per token is known."""
    if not bytes_per_token:
      return {}
    per_target = mean * weight / max(metrics.get('num_predictions', weight), 1)
    return {'bits_per_byte': per_target / math.log(2) / bytes_per_token}


@dataclasses.dataclass(frozen=True)
class ZLoss(Loss):
  """log²(Σ exp(logits)), the mean over the targets, which keeps the logits from growing.

  The z-loss of https://arxiv.org/abs/2204.02311, section 5, whose coefficient is 1e-4.
  """

  label = 'z-loss'

  def __call__(self, outputs: Outputs, batch: Batch) -> jax.Array:
    return target_sum(jnp.square(outputs.tokens.log_z), batch)


@dataclasses.dataclass(frozen=True)
class Uniform(Loss):
  """The cross-entropy of the uniform distribution over the vocabulary, for label smoothing.

  With labels smoothed by ε (https://arxiv.org/abs/1512.00567, section 7), the loss is (1 − ε) times
  CrossEntropy and ε times this one. It needs all logits at a time.
  """

  label = 'uniform cross-entropy'

  def __call__(self, outputs: Outputs, batch: Batch) -> jax.Array:
    return target_sum(outputs.tokens.log_z - outputs.logits.mean(-1), batch)
