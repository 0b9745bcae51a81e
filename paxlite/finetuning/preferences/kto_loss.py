"""Kahneman-Tversky optimization: single answers, each labelled as good or bad, without pairs.

A batch holds labelled answers as labelled_answers.py packs them: each is followed in its row by its
prompt with the answer of another record.
"""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from paxlite.finetuning.preferences.preference_losses import last_of_pairs, of_both
from paxlite.losses.loss import Loss
from paxlite.losses.metrics import Batch, Weighted
from paxlite.losses.outputs import Outputs


class _Answers(NamedTuple):
  """Values of a batch's answers, each [B, T], at the ends of an answer and its companion.

  Attributes:
    is_good: Whether this is the end of a good answer.
    is_bad: The same of bad ones.
    rewards: β times the log-ratio of the answer.
    logps: log π of the answer.
    kl: The estimate of the divergence, a scalar.
  """

  is_good: jax.Array
  is_bad: jax.Array
  rewards: jax.Array
  logps: jax.Array
  kl: jax.Array


@dataclasses.dataclass(frozen=True)
class Kto(Loss):
  """The mean over answers of w·(1 − σ(±β·(log π/π_ref − z))), with + for good answers.

  z estimates the divergence of the model from the reference. It is the mean of log π/π_ref over the
  answers to other prompts, at least 0, without a gradient. Each microbatch has its own z, as in
  trl. https://arxiv.org/abs/2402.01306, equations 7 and 8.

  Attributes:
    beta: β.
    desirable_weight: w of good answers.
    undesirable_weight: w of bad answers.
  """

  beta: float = 0.1
  desirable_weight: float = 1.0
  undesirable_weight: float = 1.0

  label = 'KTO loss'
  larger_is_better = ('rewards/chosen',)
  shown = {'rewards/chosen': 'good {:.3f}', 'rewards/rejected': 'bad {:.3f}'}
  followed = shown

  def __call__(self, outputs: Outputs, batch: Batch) -> jax.Array:
    found = self._answers(outputs, batch)
    against = found.rewards - self.beta * found.kl
    good = self.desirable_weight * (1 - jax.nn.sigmoid(against))
    bad = self.undesirable_weight * (1 - jax.nn.sigmoid(-against))
    return (jnp.where(found.is_good, good, 0) + jnp.where(found.is_bad, bad, 0)).sum()

  def weight(self, batch: Batch) -> jax.Array:
    return last_of_pairs(batch).sum().astype(jnp.float32)

  def metrics(self, outputs: Outputs, batch: Batch) -> Mapping[str, Weighted | jax.Array]:
    """Returns means over answers, by the names that trl gives them."""
    found = self._answers(outputs, batch)
    metrics: dict[str, Weighted | jax.Array] = {'kl': found.kl}
    for name, which in (('chosen', found.is_good), ('rejected', found.is_bad)):
      count = which.sum().astype(jnp.float32)
      for kind, values in (('rewards', found.rewards), ('logps', found.logps)):
        metrics[f'{kind}/{name}'] = Weighted.mean(jnp.where(which, values, 0).sum(), count)
    return metrics

  def _answers(self, outputs: Outputs, batch: Batch) -> _Answers:
    return outputs.once(self, lambda: self._computed(outputs, batch))

  def _computed(self, outputs: Outputs, batch: Batch) -> _Answers:
    signs_BT = batch['preferences']
    own, other = jnp.abs(signs_BT) == 1, jnp.abs(signs_BT) == 2
    ratios = of_both(outputs.log_probs - outputs.reference.log_probs, batch, own, other)
    logps = of_both(outputs.log_probs, batch, own, other)
    count = jnp.maximum(ratios.is_last.sum(), 1)
    kl = jnp.maximum(jax.lax.stop_gradient(ratios.rejected.sum() / count), 0)
    is_good, is_bad = ratios.is_last & (signs_BT > 0), ratios.is_last & (signs_BT < 0)
    return _Answers(is_good, is_bad, self.beta * ratios.chosen, logps.chosen, kl)
