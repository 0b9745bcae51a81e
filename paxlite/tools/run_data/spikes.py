"""Finds the steps whose recorded loss is far above that of the steps before them."""

import dataclasses
import statistics
from collections.abc import Mapping

_BEFORE = 5  # recorded steps that a loss is compared with
_LEAST = 4  # so many times the usual difference is a spike
_FEWEST = 8  # recorded steps


@dataclasses.dataclass(frozen=True)
class Spike:
  """A recorded step whose loss is above the median of the steps before it.

  Attributes:
    step: The step.
    loss: Its loss.
    before: The median loss of up to five recorded steps before it.
  """

  step: int
  loss: float
  before: float

  @property
  def height(self) -> float:
    return self.loss - self.before


def spikes(losses: Mapping[int, float]) -> list[Spike]:
  """Returns the spikes of recorded losses by step, the highest first.

  A spike is more than four times as far above the steps before it as half of all steps are away
  from theirs, and no lower than the steps next to it.
  """
  steps = sorted(losses)
  if len(steps) < _FEWEST:
    return []
  found = []
  for i, step in enumerate(steps[1:], 1):
    before = [losses[s] for s in steps[max(0, i - _BEFORE) : i]]
    found.append(Spike(step, losses[step], statistics.median(before)))
  usual = statistics.median(abs(spike.height) for spike in found)
  is_top = lambda i: all(
    losses[steps[j]] <= losses[steps[i]] for j in (i - 1, i + 1) if j < len(steps)
  )
  high = [s for i, s in enumerate(found, 1) if is_top(i) and s.height > _LEAST * usual]
  return sorted(high, key=lambda spike: -spike.height)
