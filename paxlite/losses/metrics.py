"""Metrics: values, each with the weight that it was averaged over."""

import math
from collections.abc import Mapping
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from paxlite.layers.sown import is_count, is_maximum

Batch = Mapping[str, jax.Array]


class Weighted(NamedTuple):
  """A mean `value` over a total `weight`; both are scalars.

  By its name it may be a maximum (sown.is_maximum) or a count (sown.is_count) instead.
  """

  value: jax.Array
  weight: jax.Array

  @classmethod
  def mean(cls, total: jax.Array, weight: jax.Array) -> Self:
    """Returns the mean total / weight; that over nothing is 0."""
    return cls(total / divisor(weight), weight)


def divisor(weight: jax.Array) -> jax.Array:
  """Returns a weight to divide by: infinity for 0, so that what has no weight does not count."""
  return jnp.where(weight > 0, weight, jnp.inf)


Metrics = dict[str, Weighted]


def scalars(metrics: Metrics) -> Metrics:
  """Returns the metrics without arrays, which only the step itself reads."""
  return {name: m for name, m in metrics.items() if not m.value.ndim}


def over_microbatches(name: str, m: Weighted) -> Weighted:
  """Returns one metric of a step from its values and weights [n] over n microbatches."""
  if len(m.value) == 1:
    return Weighted(m.value[0], m.weight[0])
  if is_maximum(name):
    return Weighted(m.value.max(0), m.weight.sum())
  if is_count(name):
    return Weighted(m.value.sum(), m.weight.mean())
  weighted = jnp.where(m.weight == 0, 0, m.value * m.weight)  # a mean over nothing may be NaN
  return Weighted.mean(weighted.sum(), m.weight.sum())


def num_tokens(batch: Mapping[str, jax.Array]) -> jax.Array:
  """Returns the number of positions of a batch that are not padding."""
  segment_ids_BT = batch.get('segment_ids')
  if segment_ids_BT is None:
    return jnp.float32(batch['ids'].size)
  return (segment_ids_BT > 0).sum().astype(jnp.float32)


class Mean:
  """Weighted means and maxima over many batches, accumulated on the host in float64."""

  def __init__(self) -> None:
    self._sums: dict[str, float] = {}
    self._weights: dict[str, float] = {}
    self._largest: dict[str, float] = {}

  def add(self, metrics: Mapping[str, Weighted]) -> None:
    for name, m in metrics.items():
      weight = float(m.weight)
      if is_maximum(name):
        self._largest[name] = max(self._largest.get(name, -math.inf), float(m.value))
        continue
      self._weights[name] = self._weights.get(name, 0.0) + weight
      self._sums[name] = self._sums.get(name, 0.0) + (float(m.value) * weight if weight else 0.0)

  def result(self) -> dict[str, float]:
    """Returns the means, maxima and counts by name."""
    divisors = {n: 1.0 if is_count(n) else w or math.inf for n, w in self._weights.items()}
    return {n: s / divisors[n] for n, s in self._sums.items()} | self._largest

  def weight(self, name: str) -> float:
    return self._weights.get(name, 0.0)


def to_host(metrics: Metrics) -> dict[str, float]:
  """Returns the values as floats, without their weights; waits for the device."""
  return {name: float(np.asarray(m.value)) for name, m in jax.device_get(metrics).items()}
