"""Loss spikes."""

import collections
import math


class SpikeDetector:
  """Tells a loss that is far above those before it.

  Args:
    factor: A loss above `factor` times the mean of the last `window` ones is a spike.
    window: Before so many losses nothing is one.
  """

  def __init__(self, factor: float, window: int):
    self._factor = factor
    self._losses: collections.deque[float] = collections.deque(maxlen=window)

  def __call__(self, loss: float) -> bool:
    """Whether `loss` is a spike; if not, it counts for those that follow.

    One that is not finite is neither: its step is skipped.
    """
    if not math.isfinite(loss):
      return False
    full = len(self._losses) == self._losses.maxlen
    if full and loss > self._factor * sum(self._losses) / len(self._losses):
      self._losses.clear()
      return True
    self._losses.append(loss)
    return False
