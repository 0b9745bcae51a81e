"""Finds the steps whose recorded loss is far above that of the steps beside them."""

import dataclasses
import statistics
from collections.abc import Mapping

_BESIDE = 5  # recorded steps on each side that a loss is compared with
_LEAST = 4  # so many times the usual difference is a spike
_FEWEST = 8  # recorded steps


@dataclasses.dataclass(frozen=True)
class Spike:
  """A recorded step whose loss is above the median of the steps beside it.

  Attributes:
    step: The step.
    loss: Its loss.
    beside: The median loss of up to ten recorded steps around it.
  """

  step: int
  loss: float
  beside: float

  @property
  def height(self) -> float:
    return self.loss - self.beside


def spikes(losses: Mapping[int, float]) -> list[Spike]:
  """Returns the spikes of recorded losses by step, the highest first.

  A spike is more than four times as far above its neighbors as half of the steps are away from
  theirs, and no lower than the steps next to it.
  """
  steps = sorted(losses)
  if len(steps) < _FEWEST:
    return []
  found = []
  for i, step in enumerate(steps):
    around = steps[max(0, i - _BESIDE) : i] + steps[i + 1 : i + 1 + _BESIDE]
    found.append(Spike(step, losses[step], statistics.median(losses[s] for s in around)))
  usual = statistics.median(abs(spike.height) for spike in found)
  is_top = lambda i: all(
    losses[steps[j]] <= losses[steps[i]] for j in (i - 1, i + 1) if 0 <= j < len(steps)
  )
  # the first losses fall fast, so that all of them are above what follows
  high = [s for i, s in enumerate(found) if i and is_top(i) and s.height > _LEAST * usual]
  return sorted(high, key=lambda spike: -spike.height)
