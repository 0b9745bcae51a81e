"""The events of the loop: their order, what a callback may request, and errors in one."""

import jax
import pytest

from paxlite.adapters.untrained_rows import UntrainedRows
from paxlite.aot.run_callbacks import MeasuredStep
from paxlite.checkpointing.checkpoints import Checkpoints
from paxlite.core.errors import TrainingError, UserError
from paxlite.experiments.demo import TinyGPT
from paxlite.local_checkpoints.callbacks import LocalSaves
from paxlite.programs.run import Run
from paxlite.run_data.data_records import DataRecords
from paxlite.training.best import Best
from paxlite.training.callbacks import Callback, LoopRequest
from paxlite.training.loss_alarm import LossAlarm
from paxlite.training.profiling import StepProfiler
from paxlite.training.spikes import SpikeDetector
from tests.support import runs

VALUES = dict(NUM_LAYERS=1, MODEL_DIMS=16, NUM_HEADS=2, CHECKPOINT_EVERY_N_STEPS=2, MAX_STEPS=4)


class Recorded(Callback):
  """Notes the events; returns `answers` by event, raises those that are errors."""

  def __init__(self, answers=None, name='', events=None):
    self.answers, self.name = dict(answers or {}), name
    self.events = [] if events is None else events

  def _note(self, event, step):
    self.events.append(f'{self.name}{event} {step}')
    answer = self.answers.pop((event, step), None)
    if isinstance(answer, Exception):
      raise answer
    return answer

  def resume(self, step):
    return self._note('resume', step)

  def on_start(self, state, step, loop):
    self._note('start', step)

  def before_step(self, state, step, loop):
    self._note('before', step)

  def after_step(self, state, step, metrics, loop):
    assert isinstance(metrics['Metrics/total_loss'].value, jax.Array)
    return self._note('after', step)

  def on_evaluation(self, state, step, evaluations, summaries):
    assert int(state.step) == step
    return self._note('evaluation', step)

  def on_save(self, state, step, loop):
    self._note('save', step)

  def on_end(self, state, step, loop):
    self._note('end', step)

  def close(self):
    self._note('close', '')


def trained(folder, *callbacks, **values):
  """Trains with these callbacks; returns the last state."""
  experiment = TinyGPT(**VALUES | values)
  experiment.validate()
  folder.mkdir(exist_ok=True)
  trainer = Run(experiment, folder).trainer()
  trainer.callbacks = [*callbacks, *trainer.callbacks]
  return trainer.train(*trainer.store.initial())


def saved(folder) -> list[int]:
  return Checkpoints(folder / 'checkpoints').steps()


def test_events_in_their_order_and_callbacks_in_theirs(tmp_path):
  events = []
  first, second = Recorded(None, 'a ', events), Recorded(None, 'b ', events)
  trained(tmp_path, first, second, EVAL_INTERVAL_STEPS=3)
  assert events == [
    f'{name} {event}'
    for event in (
      'resume 0', 'start 0', 'before 0', 'after 1', 'before 1', 'after 2', 'save 2', 'before 2',
      'after 3', 'evaluation 3', 'before 3', 'after 4', 'evaluation 4', 'save 4', 'end 4', 'close ',
    )
    for name in 'ab'
  ]  # fmt: skip


def test_the_order_of_the_loops_own_parts(tmp_path):
  """The class Callback states it."""
  own = Recorded()

  class Whole(TinyGPT):
    def callbacks(self):
      return [own]

    def eval_inputs(self):
      return {'same': self.train_input()}

  values = dict(LOSS_SPIKE_FACTOR=2.0, KEEP_BEST=True, LOCAL_CHECKPOINT_EVERY_N_STEPS=2)
  e = Whole(**VALUES, **values, LOCAL_CHECKPOINT_DIR=str(tmp_path / 'local'))
  kinds = [type(c) for c in Run(e, tmp_path).trainer().callbacks]
  last = [StepProfiler, LossAlarm, UntrainedRows, MeasuredStep]
  assert kinds == [DataRecords, LocalSaves, SpikeDetector, Best, Recorded, *last]


@pytest.mark.slow
def test_a_request_to_end_after_a_step_saves_it(tmp_path):
  listener = Recorded({('after', 3): LoopRequest.END, ('after', 1): 'nothing that counts'})
  assert int(trained(tmp_path, listener).step) == 3
  assert saved(tmp_path) == [2, 3]
  assert listener.events[-3:] == ['save 3', 'end 3', 'close ']
  again = Recorded({('resume', 3): LoopRequest.END})
  trained(tmp_path, again)
  assert again.events[:2] == ['resume 3', 'start 3']
  assert 'before 3' not in again.events, 'it says that the run had ended'
  assert int(trained(tmp_path, Recorded()).step) == 4, 'it does not say so'


def test_a_request_to_end_after_an_evaluation(tmp_path):
  listener = Recorded({('evaluation', 3): Callback.END})
  assert int(trained(tmp_path, listener, EVAL_INTERVAL_STEPS=3).step) == 3


@pytest.mark.slow
def test_a_request_to_roll_back_goes_before_one_to_end(tmp_path):
  ends, back = (
    Recorded({('after', 3): LoopRequest.END}),
    Recorded({('after', 3): LoopRequest.ROLL_BACK}),
  )
  assert int(trained(tmp_path, ends, back).step) == 4
  assert back.events[7:11] == ['before 2', 'after 3', 'start 2', 'before 2']
  assert [r['step'] for r in runs.records(tmp_path)] == [1, 2, 3, 4]
  folder = tmp_path / 'none'
  with pytest.raises(TrainingError, match='no checkpoint exists to roll back to'):
    trained(folder, Recorded({('after', 1): LoopRequest.ROLL_BACK}))


@pytest.mark.cases(fast=1, slow=1)
@pytest.mark.parametrize(
  ('event', 'step', 'expected'),
  [
    ('before', 3, [2, 3]),
    ('after', 3, [2, 3]),
    ('evaluation', 3, [2, 3]),
    ('save', 2, [2]),
    ('end', 4, [2, 4]),
  ],
)
def test_an_error_ends_the_run_with_its_state_saved(tmp_path, event, step, expected):
  listener = Recorded({(event, step): ConnectionError('no network')})
  with pytest.raises(ConnectionError, match='no network'):
    trained(tmp_path, listener, EVAL_INTERVAL_STEPS=3)
  assert saved(tmp_path) == expected
  assert listener.events[-1] == 'close '


def test_objects_that_are_no_callbacks_are_refused():
  class Wrong(TinyGPT):
    def callbacks(self):
      return [print]

    def trackers(self, folder):
      return [print]

  with pytest.raises(UserError, match=r'must return a list of paxlite.Callback'):
    Wrong().callbacks()
  with pytest.raises(UserError, match=r'must return a list of .*Writer'):
    Wrong().trackers('folder')


@pytest.mark.slow
def test_an_error_after_a_step_does_not_lose_its_evaluation(tmp_path):
  class Evaluated(TinyGPT):
    def eval_inputs(self):
      config = self.train_input()
      config.max_eval_batches = 1
      return {'same': config}

  failing = Recorded({('after', 2): RuntimeError('once')})
  e = Evaluated(**VALUES | dict(MAX_STEPS=2, EVAL_INTERVAL_STEPS=2))
  for callbacks in ([failing], []):
    trainer = Run(e, tmp_path).trainer()
    trainer.callbacks = [*trainer.callbacks, *callbacks]
    state, step = trainer.store.initial()
    if callbacks:
      with pytest.raises(RuntimeError, match='once'):
        trainer.train(state, step)
    else:
      assert step == 2
      trainer.train(state, step)
  assert [r['step'] for r in runs.records(tmp_path, 'eval_metrics.jsonl')] == [2]


def test_no_loss_is_a_multiple_of_a_mean_that_is_not_positive():
  spikes = SpikeDetector(factor=2.0, window=2)
  assert not any(map(spikes, (-1.0, -1.1, -0.5, 0.1, -0.1, 5.0)))
  assert spikes(20.0)
