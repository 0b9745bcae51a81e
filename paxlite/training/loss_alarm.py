"""Warns when a run seems to learn nothing: a loss that is 0 or constant, or no learned token."""

import math

import numpy as np

from paxlite.losses.metrics import Metrics, Weighted
from paxlite.training.callbacks import Callback, Loop
from paxlite.training.train_state import TrainState

_STEPS = 10  # in a row, before anything is said
_TEXTS = {
  'unlearned': 'no token is learned: all have weight 0. `paxlite data RUN` shows the examples',
  'zero': 'the loss is exactly 0: nothing is learned. `paxlite data RUN` shows the examples',
  'constant': (
    'the loss is exactly {loss:.6g} in each: neither the parameters nor the data change it. Check '
    'LEARNING_RATE, frozen variables, and the loss'
  ),
}


class LossAlarm(Callback):
  """Prints a line when ten steps in a row seem to learn nothing; what goes on is said once.

  A step is looked at after the next one is dispatched, so that no device waits.
  """

  def on_start(self, state: TrainState, step: int, loop: Loop) -> None:
    self._before: Weighted | None = None
    self._loss = math.nan
    self._counts = dict.fromkeys(_TEXTS, 0)

  def after_step(self, state: TrainState, step: int, metrics: Metrics, loop: Loop) -> None:
    before, self._before = self._before, metrics['Metrics/total_loss']
    if before is not None:
      self._look(float(np.asarray(before.value)), float(np.asarray(before.weight)), step - 1, loop)

  def _look(self, loss: float, weight: float, step: int, loop: Loop) -> None:
    is_now = {
      'unlearned': not weight,
      'zero': weight > 0 and loss == 0,
      'constant': weight > 0 and loss == self._loss != 0,
    }
    self._loss = loss
    for kind, holds in is_now.items():
      self._counts[kind] = self._counts[kind] + 1 if holds else 0
      if self._counts[kind] == _STEPS:
        text = _TEXTS[kind].format(loss=loss)
        loop.summaries.say(f'ALARM: in steps {step - _STEPS + 1:,} to {step:,} {text}')
