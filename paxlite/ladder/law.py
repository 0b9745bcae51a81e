"""The loss as a function of model size, with its uncertainty.

The law is L(N) = E + A · N^−α (https://arxiv.org/abs/2203.15556, with one number of tokens for all
sizes). For a given α it is a line in N^−α through the mean losses of the sizes. Its least squares,
and its prediction with an unknown variance, which has a Student's t-distribution, are known in
closed form. The exponents are weighed by how well their lines fit. So few sizes with much noise
give a wide interval, and nothing is drawn at random.

What the law misses is an error of a size, which more seeds of that size do not make smaller. So the
variance is that of the means around the law, and a single run also has the variance between seeds.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from scipy import optimize, special

from paxlite.core.errors import UserError

_EXPONENTS = np.geomspace(0.01, 2.0, 400)
MIN_SIZES = 4


@dataclasses.dataclass(frozen=True)
class Prediction:
  """The prediction of a law for one size."""

  loss: float  # the median
  low: float  # the end of the interval below it
  high: float  # the end above it

  def holds(self, loss: float) -> bool:
    """Whether a loss is in the interval."""
    return self.low <= loss <= self.high


class ScalingLaw:
  """A law through measured losses."""

  def __init__(self, sizes: Sequence[float], losses: Sequence[float]):
    """Fits the law.

    Raises UserError if there are fewer than MIN_SIZES sizes, a loss is not finite, or no law fits.

    Args:
      sizes: The number of parameters of each model, above 0. Several models may have one size.
      losses: The loss of each.
    """
    if not np.isfinite(losses).all():
      raise UserError(f'a loss is not finite: {list(losses)}')
    self.sizes = np.unique(np.asarray(sizes, float))
    if len(self.sizes) < MIN_SIZES:
      raise UserError(
        f'{len(self.sizes)} sizes cannot determine a law of three numbers and its uncertainty: '
        f'train {MIN_SIZES}'
      )
    of_size = [np.asarray(losses, float)[np.asarray(sizes) == size] for size in self.sizes]
    self.losses = np.array([x.mean() for x in of_size])
    self._between_seeds = _variance_within(of_size)
    fits = [self._line(alpha) for alpha in _EXPONENTS]
    self._at_ends = np.array([ends for ends, *_ in fits])
    self._grams = np.array([gram for _, gram, *_ in fits])
    self._variances = np.array([variance for *_, variance in fits])
    self._weights = self._weighed()
    median = int(np.searchsorted(np.cumsum(self._weights), 0.5))
    self.exponent: float = float(_EXPONENTS[median])
    self.amplitude, self.limit = self._coefficients(median)

  @property
  def _freedom(self) -> int:
    return len(self.losses) - 2

  def _basis(self, alpha: float, sizes: np.ndarray) -> np.ndarray:
    """Returns the shares of the smallest and the largest model's losses in the losses of sizes."""
    low, high = (n**-alpha for n in (self.sizes.max() / self.sizes.min(), 1.0))
    # in units of the smallest size, so that no power is too small
    power = (sizes / self.sizes.min()) ** -alpha
    share = (power - low) / (high - low)
    return np.stack([share, 1 - share], -1)

  def _line(self, alpha: float) -> tuple[np.ndarray, np.ndarray, float]:
    """Returns the losses at both ends, the inverse of XᵀX, and the variance of the noise."""
    x = self._basis(alpha, self.sizes)
    gram = np.linalg.inv(x.T @ x)
    ends = gram @ x.T @ self.losses
    rest = self.losses - x @ ends
    return ends, gram, float(rest @ rest) / self._freedom

  def _weighed(self) -> np.ndarray:
    """Returns the weight of each exponent, by its likelihood; losses do not go below zero."""
    floor = max(float(self._variances.max()) * 1e-12, 1e-30)
    variances = np.maximum(self._variances, floor)
    logs = 0.5 * np.linalg.slogdet(self._grams)[1] - 0.5 * self._freedom * np.log(variances)
    possible = [e[0] >= e[1] and self._coefficients(i)[1] >= 0 for i, e in enumerate(self._at_ends)]
    if not any(possible):
      raise UserError(
        'no law fits these losses, for example if larger models did not reach lower ones: train '
        'for more steps, or with more seeds'
      )
    weights = np.where(possible, np.exp(logs - logs[possible].max()), 0.0)
    return weights / weights.sum()

  def _coefficients(self, i: int) -> tuple[float, float]:
    """Returns A and E of an exponent."""
    alpha, (first, last) = _EXPONENTS[i], self._at_ends[i]
    low = (self.sizes.max() / self.sizes.min()) ** -alpha
    scale = (first - last) / (1 - low)
    return float(scale * self.sizes.min() ** alpha), float(first - scale)

  def predict(self, size: float, confidence: float = 0.9) -> Prediction:
    """Returns the predicted loss of one model of a size.

    Args:
      size: Its number of parameters.
      confidence: The share of such intervals that should hold the loss, if the law holds.
    """
    x = np.stack([self._basis(alpha, np.array(float(size))) for alpha in _EXPONENTS])
    centers = np.einsum('ai,ai->a', x, self._at_ends)
    of_line = self._variances * np.einsum('ai,aij,aj->a', x, self._grams, x)
    spreads = np.sqrt(np.maximum(self._variances, self._between_seeds) + of_line)
    spreads = np.maximum(spreads, 1e-12)
    below = lambda loss: float(
      self._weights @ special.stdtr(self._freedom, (loss - centers) / spreads)
    )
    reach = 1e3 * spreads.max() + np.ptp(centers) + 1
    quantile = lambda q: float(
      optimize.brentq(lambda v: below(v) - q, centers.min() - reach, centers.max() + reach)
    )
    tail = (1 - confidence) / 2
    return Prediction(*(max(0.0, quantile(q)) for q in (0.5, tail, 1 - tail)))

  def exponent_interval(self, confidence: float = 0.9) -> tuple[float, float]:
    """Returns the exponents between which α lies with this probability."""
    sums = np.cumsum(self._weights)
    tail = (1 - confidence) / 2
    at = lambda q: float(_EXPONENTS[min(int(np.searchsorted(sums, q)), len(sums) - 1)])
    return at(tail), at(1 - tail)

  @property
  def is_determined(self) -> bool:
    """Whether the exponent is known to a factor of ten."""
    low, high = self.exponent_interval()
    return high < 10 * low


def _variance_within(of_sizes: Sequence[np.ndarray]) -> float:
  """Returns the variance of the losses of models of one size; 0 if no size has two."""
  freedom = sum(len(losses) - 1 for losses in of_sizes)
  squares = sum(float(((losses - losses.mean()) ** 2).sum()) for losses in of_sizes)
  return squares / freedom if freedom else 0.0
