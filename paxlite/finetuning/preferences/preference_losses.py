"""Losses of preferences: the model is to give a chosen answer more probability than a rejected one.

A batch holds pairs as preference_rows.py packs them: `preferences` [B, T] is 1 for the tokens of a
chosen answer and its prompt, −1 for those of the rejected one that follows it in the row, and 0
otherwise. log π is the sum of the logarithms of the probabilities of an answer's tokens.
"""

import abc
import dataclasses
from collections.abc import Mapping
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from paxlite.finetuning.segment_sums import is_last, running_sums
from paxlite.losses.loss import Loss
from paxlite.losses.metrics import Batch, Weighted
from paxlite.losses.outputs import Outputs

Kind = Literal['sigmoid', 'hinge', 'ipo', 'robust']


class Pairs(NamedTuple):
  """Values of a batch's pairs, each [B, T], only at the last token of a pair.

  Attributes:
    is_last: Whether this is the last token of a pair.
    chosen: A value of the chosen answers.
    rejected: The same of the rejected answers.
  """

  is_last: jax.Array
  chosen: jax.Array
  rejected: jax.Array


class PairLosses(NamedTuple):
  """A loss's results for pairs.

  Attributes:
    losses_BT: The loss of each pair at its last token; elsewhere any number.
    rewards: The rewards that the model implies for its answers.
    logps: log π of the answers, or its mean over tokens, if the loss is made of that.
  """

  losses_BT: jax.Array
  rewards: Pairs
  logps: Pairs


def last_of_pairs(batch: Batch) -> jax.Array:
  """Returns whether each token [B, T] is the last of a pair.

  Pairs without weights do not count: they fill up the last batch of an evaluation.
  """
  pairs_BT = _pairs(batch)
  (counted_BT,) = running_sums(batch['weights'][None], pairs_BT)
  return is_last(pairs_BT) & (counted_BT > 0)


def of_pairs(values_BT: jax.Array, batch: Batch, empty: float = 0.0) -> Pairs:
  """Returns the sums of values over the answers of each pair.

  Args:
    values_BT: Values of tokens, of which those of answers count.
    batch: The batch.
    empty: What stands where no pair ends.
  """
  signs_BT = batch['preferences']
  return of_both(values_BT, batch, signs_BT == 1, signs_BT == -1, empty)


def of_both(
  values_BT: jax.Array,
  batch: Batch,
  is_chosen_BT: jax.Array,
  is_rejected_BT: jax.Array,
  empty: float = 0.0,
) -> Pairs:
  """Returns what of_pairs does, with the tokens of the first and the second answers given."""
  weighted_BT = values_BT * batch['weights']
  parts = [jnp.where(x, weighted_BT, 0) for x in (is_chosen_BT, is_rejected_BT)]
  ends = last_of_pairs(batch)
  chosen, rejected = (
    jnp.where(ends, x, empty) for x in running_sums(jnp.stack(parts), _pairs(batch))
  )
  return Pairs(ends, chosen, rejected)


def _pairs(batch: Batch) -> jax.Array:
  return (batch['segment_ids'] + 1) // 2


@dataclasses.dataclass(frozen=True)
class _MeanOverPairs(Loss):
  """A mean over pairs."""

  label = 'preference loss'
  larger_is_better = ('rewards/accuracies', 'rewards/margins', 'rewards/chosen')
  shown = {'rewards/accuracies': 'accuracy {:.3f}', 'rewards/margins': 'margin {:.3f}'}
  followed = shown

  @abc.abstractmethod
  def pairs(self, outputs: Outputs, batch: Batch) -> PairLosses:
    """Returns the loss of each pair, and what the metrics say."""

  def __call__(self, outputs: Outputs, batch: Batch) -> jax.Array:
    found = self.pairs(outputs, batch)
    return jnp.where(found.rewards.is_last, found.losses_BT, 0).sum()

  def weight(self, batch: Batch) -> jax.Array:
    return last_of_pairs(batch).sum().astype(jnp.float32)

  def metrics(self, outputs: Outputs, batch: Batch) -> Mapping[str, Weighted | jax.Array]:
    """Returns the means over pairs, by the names that trl gives them."""
    _, rewards, logps = self.pairs(outputs, batch)
    margins = rewards.chosen - rewards.rejected
    values = {
      'rewards/chosen': rewards.chosen,
      'rewards/rejected': rewards.rejected,
      'rewards/accuracies': margins > 0,
      'rewards/margins': margins,
      'logps/chosen': logps.chosen,
      'logps/rejected': logps.rejected,
    }
    total = lambda x: jnp.where(rewards.is_last, x, 0).astype(jnp.float32).sum()
    return {name: Weighted.mean(total(x), self.weight(batch)) for name, x in values.items()}


@dataclasses.dataclass(frozen=True)
class Dpo(_MeanOverPairs):
  """Direct preference optimization, https://arxiv.org/abs/2305.18290, equation 7.

  With h = β·(log π/π_ref of the chosen − that of the rejected answer), the loss of a pair is

  - sigmoid: −log σ(h);
  - hinge: max(0, 1 − h), https://arxiv.org/abs/2305.10425;
  - ipo: (m − 1/(2β))², where m is the difference of the means over tokens of log π/π_ref,
    https://arxiv.org/abs/2310.12036, equation 17, and means as trl has them;
  - robust: (−(1 − ε)·log σ(h) + ε·log σ(−h)) / (1 − 2ε), https://arxiv.org/abs/2403.00409.

  Attributes:
    kind: One of these.
    beta: β.
    flipped: ε, the share of pairs whose answers are in the wrong order.
  """

  kind: Kind = 'sigmoid'
  beta: float = 0.1
  flipped: float = 0.0

  def pairs(self, outputs: Outputs, batch: Batch) -> PairLosses:
    ratios = of_pairs(outputs.log_probs - outputs.reference.log_probs, batch)
    rewards = _times(self.beta, ratios)
    losses_BT = self._losses(rewards.chosen - rewards.rejected, ratios, batch)
    return PairLosses(losses_BT, rewards, of_pairs(outputs.log_probs, batch))

  def _losses(self, h: jax.Array, ratios: Pairs, batch: Batch) -> jax.Array:
    if self.kind == 'hinge':
      return jnp.maximum(0, 1 - h)
    if self.kind == 'ipo':
      means = _over_lengths(ratios, batch)
      return jnp.square(means.chosen - means.rejected - 1 / (2 * self.beta))
    clean, swapped = -jax.nn.log_sigmoid(h), -jax.nn.log_sigmoid(-h)
    if self.kind == 'robust':
      return ((1 - self.flipped) * clean - self.flipped * swapped) / (1 - 2 * self.flipped)
    return clean


@dataclasses.dataclass(frozen=True)
class SimPo(_MeanOverPairs):
  """−log σ(β·(difference of the means of log π over tokens) − γ), without a reference.

  https://arxiv.org/abs/2405.14734, equation 6.

  Attributes:
    beta: β.
    gamma: γ, the margin.
  """

  beta: float = 2.0
  gamma: float = 1.0

  def pairs(self, outputs: Outputs, batch: Batch) -> PairLosses:
    means = _over_lengths(of_pairs(outputs.log_probs, batch), batch)
    rewards = _times(self.beta, means)
    losses_BT = -jax.nn.log_sigmoid(rewards.chosen - rewards.rejected - self.gamma)
    return PairLosses(losses_BT, rewards, means)


@dataclasses.dataclass(frozen=True)
class OddsRatio(_MeanOverPairs):
  """ORPO's −β·log σ(log odds of the chosen − log odds of the rejected answer), with a ChosenLoss.

  The odds are p / (1 − p), with the geometric mean p of the probabilities of an answer's tokens.
  https://arxiv.org/abs/2403.07691, equations 6 and 7.

  Attributes:
    beta: β, λ in the paper.
  """

  beta: float = 0.1

  def pairs(self, outputs: Outputs, batch: Batch) -> PairLosses:
    means = _over_lengths(of_pairs(outputs.log_probs, batch, empty=-1.0), batch)
    log_odds = lambda x: x - jnp.log(-jnp.expm1(jnp.minimum(x, -1e-7)))
    ratio = log_odds(means.chosen) - log_odds(means.rejected)
    return PairLosses(-self.beta * jax.nn.log_sigmoid(ratio), _times(self.beta, means), means)


@dataclasses.dataclass(frozen=True)
class ChosenLoss(Loss):
  """The cross-entropy of the chosen answers and their prompts, the mean over tokens, as in ORPO."""

  label = 'cross-entropy of chosen'

  def __call__(self, outputs: Outputs, batch: Batch) -> jax.Array:
    return jnp.where(self._is_counted(batch), outputs.tokens.xent, 0).sum()

  def weight(self, batch: Batch) -> jax.Array:
    return self._is_counted(batch).sum().astype(jnp.float32)

  def _is_counted(self, batch: Batch) -> jax.Array:
    has_targets = batch['weights'].max(1, keepdims=True) > 0  # others fill up an evaluation
    return (batch['preferences'] > 0) & has_targets


def _times(factor: float, pairs: Pairs) -> Pairs:
  return pairs._replace(chosen=factor * pairs.chosen, rejected=factor * pairs.rejected)


def _over_lengths(sums: Pairs, batch: Batch) -> Pairs:
  """Returns sums divided by the numbers of tokens of the answers."""
  lengths = of_pairs(jnp.ones_like(batch['weights']), batch)
  at_least_1 = lambda x: jnp.maximum(x, 1)
  return sums._replace(
    chosen=sums.chosen / at_least_1(lengths.chosen),
    rejected=sums.rejected / at_least_1(lengths.rejected),
  )
