"""Weighted metrics: a value and the weight that it was averaged over."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np


class Weighted(NamedTuple):
  """A mean `value` over a total `weight`; both scalars."""

  value: jax.Array
  weight: jax.Array


Metrics = dict[str, Weighted]


class Mean:
  """Weighted means over many batches, accumulated on the host in float64."""

  def __init__(self):
    self._sums: dict[str, float] = {}
    self._weights: dict[str, float] = {}

  def add(self, metrics: Mapping[str, Weighted]) -> None:
    for name, m in metrics.items():
      weight = float(m.weight)
      self._weights[name] = self._weights.get(name, 0.0) + weight
      self._sums[name] = self._sums.get(name, 0.0) + (float(m.value) * weight if weight else 0.0)

  def result(self) -> dict[str, float]:
    return {n: s / self._weights[n] if self._weights[n] else 0.0 for n, s in self._sums.items()}

  def weight(self, name: str) -> float:
    return self._weights.get(name, 0.0)


def to_host(metrics: Metrics) -> dict[str, float]:
  """The values alone, as floats; waits for the device."""
  return {name: float(np.asarray(m.value)) for name, m in jax.device_get(metrics).items()}
