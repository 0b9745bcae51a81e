"""Limits how many steps the host may be ahead of the device."""

import collections
from collections.abc import Callable

from paxlite.losses.metrics import Metrics

# While the device computes one step, the host prepares and dispatches the next one. More steps in
# flight would not keep the device busier. They would delay the reaction to a signal or a bad step.
_MOST = 2


class StepsInFlight:
  """The steps that are dispatched and may still be running.

  Args:
    done: Called with each step and its metrics, in order. It has to wait for the device.
  """

  def __init__(self, done: Callable[[int, Metrics], None]):
    self._done = done
    self._steps: collections.deque[tuple[int, Metrics]] = collections.deque()

  def add(self, step: int, metrics: Metrics) -> None:
    """Adds a dispatched step; returns when the next step may be dispatched."""
    self._steps.append((step, metrics))
    while len(self._steps) >= _MOST:
      self._done(*self._steps.popleft())

  def drain(self) -> None:
    """Waits for all steps in flight."""
    while self._steps:
      self._done(*self._steps.popleft())
