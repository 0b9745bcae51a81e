"""A listener of all events: ends training after a number of tokens, and notes what happens."""

import paxlite
from paxlite.config.attribute_kinds import Run
from paxlite.experiments.demo import TinyGPT
from paxlite.losses.metrics import to_host


class TokenBudget(paxlite.Callback):
  """Requests the end after `tokens` targets; reads metrics a step later, so no device waits."""

  def __init__(self, tokens, path):
    self._left, self._path, self._before = tokens, path, None

  def resume(self, step):
    self._note(f'resume {step}')
    return self.END if self._left <= 0 else None

  def on_start(self, state, step, loop):
    self._note(f'start {step}')

  def before_step(self, state, step, loop):
    self._note(f'before {step}')

  def after_step(self, state, step, metrics, loop):
    self._note(f'after {step}')
    before, self._before = self._before, metrics
    if before is not None:
      self._left -= to_host(before)['Metrics/num_predictions']
    return self.END if self._left <= 0 else None

  def on_evaluation(self, state, step, evaluations, summaries):
    self._note(f'evaluation {step} {sorted(evaluations)}')

  def on_save(self, state, step, loop):
    self._note(f'save {step}')

  def on_end(self, state, step, loop):
    self._note(f'end {step}')
    loop.summaries.result(step, 'budget', {'tokens_left': self._left}, f'{self._left:g} left')

  def close(self):
    self._note('close')

  def _note(self, line):
    with open(self._path, 'a') as file:
      file.write(f'{line}\n')


class WithBudget(TinyGPT):
  NUM_LAYERS = 1
  EVAL_INTERVAL_STEPS = 3
  CHECKPOINT_EVERY_N_STEPS = 2
  TOKEN_BUDGET: Run[int] = 3 * 32 * 32  # targets
  EVENT_LOG: Run[str] = ''  # a file

  def callbacks(self):
    return [TokenBudget(self.TOKEN_BUDGET, self.EVENT_LOG)]
