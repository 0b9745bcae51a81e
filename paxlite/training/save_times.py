"""Decides when a run saves: after a number of steps, or earlier if the steps take long."""

import time

import jax
import numpy as np

from paxlite.processes.process_messages import broadcast


class SaveTimes:
  """Decides after which steps to save; all processes decide the same.

  Only the clock of process 0 is used. The processes ask it at few steps, because asking needs a
  collective. From the time per step, process 0 also computes the step at which to ask next.

  Args:
    steps: Number of steps between two saves.
    seconds: Wall time between two saves, accurate to half a step; 0 means no limit.
  """

  def __init__(self, steps: int, seconds: float):
    self.steps = steps
    self._seconds = seconds
    self.restart(0)

  def restart(self, step: int) -> None:
    """Notes that the run continues from `step`, which is saved or is the first step."""
    self._saved_at = time.monotonic()
    self._asked = step, self._saved_at
    self._next = step + 1

  def due(self, step: int) -> bool:
    """Returns whether to save after `step`. Every process calls this once after each step."""
    due = bool(self._seconds) and step >= self._next and self._ask(step)
    if due or step % self.steps == 0:
      self._saved_at = time.monotonic()
      return True
    return False

  def _ask(self, step: int) -> bool:
    now = time.monotonic()
    done = step - self._asked[0]
    step_seconds = max(now - self._asked[1], 1e-9) / done
    left = self._seconds - (now - self._saved_at)
    due = left < step_seconds / 2
    wanted = (self._seconds if due else left) / step_seconds
    # at most twice as many steps as last time, because the first steps may take longer or shorter
    answer = np.array([due, max(1, min(round(wanted), 2 * done))], np.int32)
    if jax.process_count() > 1:
      answer = np.frombuffer(broadcast(answer.tobytes()), np.int32)
    self._asked = step, now
    self._next = step + int(answer[1])
    return bool(answer[0])
