"""When a run saves: after every so many steps, and where these take long, by the clock."""

import time

import jax
import numpy as np
from jax.experimental import multihost_utils


class SaveTimes:
  """Decides after which steps to save, in the same way in every process.

  The clock is process 0's. It is asked at few steps, since asking costs a collective, and says each
  time at which step it wants to be asked next, from how long the steps take.

  Args:
    steps: Between two saves.
    seconds: Wall time from one save to the next, to half a step; 0 for no limit.
  """

  def __init__(self, steps: int, seconds: float):
    self._steps = steps
    self._seconds = seconds
    self.restart(0)

  def restart(self, step: int) -> None:
    """The run continues from `step`, which is saved or the first one."""
    self._saved_at = time.monotonic()
    self._asked = step, self._saved_at
    self._next = step + 1

  def due(self, step: int) -> bool:
    """Whether to save after `step`. Every process calls this once after each step."""
    due = bool(self._seconds) and step >= self._next and self._ask(step)
    if due or step % self._steps == 0:
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
    # twice as far as the last time at most: the first steps may not be like the others
    answer = np.array([due, max(1, min(round(wanted), 2 * done))], np.int32)
    if jax.process_count() > 1:
      answer = np.asarray(multihost_utils.broadcast_one_to_all(answer))
    self._asked = step, now
    self._next = step + int(answer[1])
    return bool(answer[0])
