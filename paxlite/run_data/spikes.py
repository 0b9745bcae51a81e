"""Finds the steps with a recorded loss far above the steps before them."""

import dataclasses
import statistics
from collections.abc import Mapping

_BEFORE = 5  # recorded steps that a loss is compared with
_LEAST = 4  # so many times the noise
_FEWEST = 8  # recorded steps


@dataclasses.dataclass(frozen=True)
class Spike:
  """A recorded step with a loss above the median of the steps before it."""

  step: int
  loss: float
  before: float  # the median loss of up to five recorded steps before it

  @property
  def height(self) -> float:
    return self.loss - self.before


def spikes(losses: Mapping[int, float]) -> list[Spike]:
  """Returns the spikes of recorded losses by step, the highest first.

  A spike is no lower than the steps next to it, and further above the steps before it than four
  times the noise: the median distance of a loss from the middle of the two beside it, which does
  not depend on how fast losses fall.
  """
  steps = sorted(losses)
  if len(steps) < _FEWEST:
    return []
  found = []
  for i, step in enumerate(steps[1:], 1):
    before = [losses[s] for s in steps[max(0, i - _BEFORE) : i]]
    found.append(Spike(step, losses[step], statistics.median(before)))
  triples = zip(steps, steps[1:], steps[2:], strict=False)
  noise = statistics.median(abs(losses[b] - (losses[a] + losses[c]) / 2) for a, b, c in triples)
  is_top = lambda i: all(
    losses[steps[j]] <= losses[steps[i]] for j in (i - 1, i + 1) if j < len(steps)
  )
  high = [s for i, s in enumerate(found, 1) if is_top(i) and s.height > _LEAST * noise]
  return sorted(high, key=lambda spike: -spike.height)
