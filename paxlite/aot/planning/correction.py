"""Corrects estimates by what the compiler says of some of them.

The logarithm of (true / estimated) is taken as a Gaussian process over the candidates
(https://gaussianprocess.org/gpml, chapter 2). Its covariance is a sum: candidates that share a
value of a choice share its error; an error of one part of the estimate, such as what is saved,
counts by the share that the part has; and near candidates share the rest.
"""

from collections.abc import Sequence

import numpy as np

_COMMON = 0.5  # standard deviation of the error that all estimates share, of the logarithm
_SHARED = 0.1  # of the part that comes with one value of one choice
_PART = 0.5  # of the error of one part of an estimate
_JOINT = 0.08  # of the part that comes with a combination
_NOISE = 0.002  # of what the compiler says
_REACH = 0.3  # by how much a doubling of a number lowers the covariance, of the logarithm
_REACH_OF_PARTS = 0.1  # the same for the errors of the parts


class Correction:
  """The error of an estimate, learned from pairs of estimates and truths."""

  def __init__(self, noise: float = _NOISE):
    """Knows nothing yet.

    Args:
      noise: Standard deviation of the logarithm of a truth that is measured.
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
    """Takes what is known.

    Args:
      points: Numbers that describe the candidates, [candidates, numbers].
      parts: The shares that the parts have in their estimates, [candidates, parts].
      ratios: The logarithm of true / estimated for each of them.
      groups: The numbers that belong to each choice.
    """
    self._points, self._parts = points, parts
    self._ratios = np.asarray(ratios, float)
    self._groups = list(groups)
    covariance = self._covariance(points, parts) + np.eye(len(points)) * self._noise**2
    self._inverse = np.linalg.inv(covariance)

  def predict(self, points: np.ndarray, parts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(mean, standard deviation) of the logarithm of true / estimated for candidates."""
    prior = _COMMON**2 + _SHARED**2 * len(self._groups) + _JOINT**2
    prior = prior + _PART**2 * (parts**2).sum(1)
    if not len(self._ratios):
      return np.zeros(len(points)), np.sqrt(prior)
    cross = self._covariance(points, parts)
    weights = cross @ self._inverse
    variance = prior - (weights * cross).sum(1)
    return weights @ self._ratios, np.sqrt(np.maximum(variance, 1e-8))

  def _covariance(self, points: np.ndarray, parts: np.ndarray) -> np.ndarray:
    """The covariance of candidates with those that are known."""
    total = np.full((len(points), len(self._points)), _COMMON**2)
    distance = np.zeros_like(total)
    for group in self._groups:
      far = np.abs(points[:, None, group] - self._points[None, :, group]).sum(-1)
      total += _SHARED**2 * np.exp(-_REACH * far)
      distance += far
    total += _PART**2 * (parts @ self._parts.T) * np.exp(-_REACH_OF_PARTS * distance)
    return total + _JOINT**2 * np.exp(-_REACH * distance)
