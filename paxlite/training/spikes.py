"""Detects loss spikes, and chooses the checkpoint that a run rolls back to."""

import collections
import math

import numpy as np

from paxlite.checkpointing.checkpoints import Checkpoints
from paxlite.core.errors import TrainingError
from paxlite.core.wording import amount
from paxlite.losses.metrics import Metrics
from paxlite.training.callbacks import Callback, Loop, LoopRequest
from paxlite.training.train_state import TrainState


class SpikeDetector(Callback):
  """Finds losses that are far above the losses before them.

  Args:
    factor: A loss above `factor` times the mean of the last `window` losses is a spike.
    window: Number of losses in that mean. No loss is a spike until there are this many.
  """

  def __init__(self, factor: float, window: int):
    self._factor = factor
    self._losses: collections.deque[float] = collections.deque(maxlen=window)

  def __call__(self, loss: float) -> bool:
    """Returns whether `loss` is a spike; if it is not, it enters the mean for later losses.

    A loss that is not finite is not a spike and does not enter the mean, as its step is skipped.
    Nothing is a multiple of a mean that is not positive, so that there is no spike then.
    """
    if not math.isfinite(loss):
      return False
    full = len(self._losses) == self._losses.maxlen
    mean = sum(self._losses) / max(len(self._losses), 1)
    if full and mean > 0 and loss > self._factor * mean:
      self._losses.clear()
      return True
    self._losses.append(loss)
    return False

  def after_step(
    self, state: TrainState, step: int, metrics: Metrics, loop: Loop
  ) -> LoopRequest | None:
    """Waits for the step, as a later step would train on what the spike has left."""
    is_spike = self(float(np.asarray(metrics['Metrics/total_loss'].value)))
    return self.ROLL_BACK if is_spike else None


class Rollbacks:
  """Chooses the checkpoint that a run continues from after a loss spike.

  Args:
    checkpoints: The checkpoints of the run.
    limit: Maximum number of rollbacks of a run (MAX_ROLLBACKS).

  Attributes:
    count: Number of rollbacks so far.
  """

  def __init__(self, checkpoints: Checkpoints, limit: int):
    self._checkpoints = checkpoints
    self._limit = limit
    self._last: int | None = None
    self.count = 0

  def step_before(self, step: int, rows: str) -> int:
    """Returns the step of the last good checkpoint before the spike at `step`.

    If no checkpoint was saved since the last rollback, the checkpoint before the one that it used
    is chosen, if it exists. Later checkpoints are moved aside. Raises TrainingError if there is no
    checkpoint, or the run has rolled back too often.

    Args:
      step: The step whose loss spiked.
      rows: The rows of its batch, for messages.
    """
    self._checkpoints.wait()
    where = f'the loss spiked at step {step:,}'
    hint = f'lower LEARNING_RATE, or look at {rows}'
    if self.count >= self._limit:
      raise TrainingError(
        f'{where}, after {amount(self.count, "rollback")} (MAX_ROLLBACKS={self._limit}): {hint}'
      )
    found = None
    if self._last is not None and self._checkpoints.steps()[-1:] == [self._last]:
      found = self._checkpoints.roll_back(self._last)
    if found is None:
      found = self._checkpoints.roll_back(step)
    if found is None:
      raise TrainingError(f'{where}, and no checkpoint exists to roll back to: {hint}')
    self.count += 1
    self._last = found
    return found
