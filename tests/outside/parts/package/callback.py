"""A callback of all runs, if the attribute turns it on."""

import paxlite


class StepBudget(paxlite.Callback):
  rank = 1  # after those of paxlite

  def __init__(self, steps):
    self._steps = steps

  def start_lines(self):
    return [f'STEP_BUDGET: {self._steps} steps']

  def resume(self, step):
    return self.END if step >= self._steps else None

  def after_step(self, state, step, metrics, loop):
    return self.END if step >= self._steps else None

  def after_training(self, state):
    print(f'{int(state.step)} steps of the budget are used')


def callbacks(run, trainer):
  budget = run.experiment.STEP_BUDGET
  return [StepBudget(budget)] if budget else []
