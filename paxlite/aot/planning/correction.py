"""Corrects estimates by the compiler's verdicts about some of them.

The logarithm of (true / estimated) is modeled as a Gaussian process over the candidates
(https://gaussianprocess.org/gpml, chapter 2). Its covariance is a sum of three kinds of terms. The
first is for an error that candidates with the same value of a choice share. The second is for an
error of one part of the estimate, such as the saved activations, in proportion to the part's share.
The third is for an error that similar candidates share.
"""

from collections.abc import Sequence

import numpy as np

# standard deviations of the logarithm of (true / estimated)
_COMMON = 0.5  # of an error that all estimates share
_SHARED = 0.1  # of an error that comes with one value of one choice
_PART = 1.0  # of an error of one part of an estimate
_JOINT = 0.08  # of an error that comes with a combination of values
_NOISE = 0.002  # of the compiler's own figures
# by how much a doubling of a number lowers the logarithm of the covariance
_REACH = 0.3
_REACH_OF_PARTS = 0.1  # for the errors of parts


class Correction:
  """The error of an estimate, learned from pairs of estimates and truths."""

  def __init__(self, noise: float = _NOISE):
    """Makes a correction that changes nothing until `learn` is called.

    Args:
      noise: Standard deviation of the logarithm of a measured value.
    """
    self._noise = noise
    self._points: np.ndarray = np.zeros((0, 0))
    self._ratios: np.ndarray = np.zeros(0)
    self._parts: np.ndarray = np.zeros((0, 0))
    self._inverse: np.ndarray = np.zeros((0, 0))
    self._groups: list[slice] = []

  def learn(
    self,
    points: np.ndarray,
    parts: np.ndarray,
    ratios: Sequence[float],
    groups: Sequence[slice],
  ) -> None:
    """Fits the process to the candidates whose true values are known.

    Args:
      points: Numbers that describe the candidates, [candidates, numbers].
      parts: The shares that the parts have in their estimates, [candidates, parts].
      ratios: The logarithm of (true / estimated) for each candidate.
      groups: The columns of `points` that belong to each choice.
    """
    self._points, self._parts = points, parts
    self._ratios = np.asarray(ratios, float)
    self._groups = list(groups)
    covariance = self._covariance(points, parts) + np.eye(len(points)) * self._noise**2
    self._inverse = np.linalg.inv(covariance)

  def predict(self, points: np.ndarray, parts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (mean, standard deviation) of the logarithm of true / estimated for candidates."""
    common = _COMMON**2 + _SHARED**2 * len(self._groups) + _JOINT**2
    prior = common + _PART**2 * (parts**2).sum(1)
    if not len(self._ratios):
      return np.zeros(len(points)), np.sqrt(prior)
    cross = self._covariance(points, parts)
    weights = cross @ self._inverse
    variance = prior - (weights * cross).sum(1)
    return weights @ self._ratios, np.sqrt(np.maximum(variance, 1e-8))

  def _covariance(self, points: np.ndarray, parts: np.ndarray) -> np.ndarray:
    """Returns the covariance of candidates with those that are known."""
    total = np.full((len(points), len(self._points)), _COMMON**2)
    distance = np.zeros_like(total)
    for group in self._groups:
      far = np.abs(points[:, None, group] - self._points[None, :, group]).sum(-1)
      total += _SHARED**2 * np.exp(-_REACH * far)
      distance += far
    total += _PART**2 * (parts @ self._parts.T) * np.exp(-_REACH_OF_PARTS * distance)
    return total + _JOINT**2 * np.exp(-_REACH * distance)
