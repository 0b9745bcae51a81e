"""How many steps the host may be ahead of the device."""

import collections
from collections.abc import Callable

from paxlite.training.metrics import Metrics

# While the device does one step, the host prepares and dispatches the next; then there is nothing
# that it could do but wait. More would keep no device busier, and a signal or a bad step would be
# answered so many steps later.
_MOST = 2


class StepsInFlight:
  """The steps that are dispatched and may not be finished.

  Args:
    done: Called with a step and its metrics, in order; waits for the device.
  """

  def __init__(self, done: Callable[[int, Metrics], None]):
    self._done = done
    self._steps: collections.deque[tuple[int, Metrics]] = collections.deque()

  def add(self, step: int, metrics: Metrics) -> None:
    """`step` is dispatched; returns when another one may be."""
    self._steps.append((step, metrics))
    while len(self._steps) >= _MOST:
      self._done(*self._steps.popleft())

  def drain(self) -> None:
    """Waits for all of them."""
    while self._steps:
      self._done(*self._steps.popleft())
