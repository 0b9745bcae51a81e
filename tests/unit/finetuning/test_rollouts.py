"""Rollouts in training: their state in checkpoints, rollbacks, and what is refused."""

import contextlib

import jax
import numpy as np
import pytest

from paxlite.aot.analysis import abstract_batch
from paxlite.config.templates import config
from paxlite.core.errors import TrainingError, UserError
from paxlite.data.synthetic import SyntheticRows
from paxlite.experiments.demo import TinyGPT
from paxlite.experiments.epochs import max_steps
from paxlite.files.json_files import read_object
from paxlite.finetuning.reinforcement.rollouts import RolloutInput
from paxlite.programs.run import Run
from paxlite.training.callbacks import Callback
from tests.support import runs

VALUES = dict(NUM_LAYERS=1, MODEL_DIMS=16, NUM_HEADS=2, MAX_STEPS=6, CHECKPOINT_EVERY_N_STEPS=3)


class Own(RolloutInput):
  """Random rows, chosen by a counter and by the sum of the parameters."""

  batch_size, seq_len, max_token_id = 1, 32, 127

  def __init__(self, change=None, fails_at=None, poison=()):
    self.count, self.numbers, self.change = 0, [], change or (lambda batch: batch)
    self.fails_at, self.poison = fails_at, poison

  def next_batch(self, params, number, rows):
    self.numbers.append(number)
    self.count += 1
    if number == self.fails_at:
      raise UserError('no more rollouts')
    total = float(params['final_ln']['bias'].sum())
    batch = SyntheticRows(128, 32, seed=abs(hash((self.count, total)))).read(np.arange(1)[rows])
    if number in self.poison:
      batch['weights'] = batch['weights'] * np.float32('nan')
    return self.change(batch)

  def state(self):
    return {'count': self.count}

  def restore(self, state):
    self.count = state['count']


class Back(Callback):
  def after_step(self, state, step, metrics, loop):
    if step == 5 and loop.metadata(step)().get('rollbacks') is None:
      return self.ROLL_BACK
    return None


def trainer_of(folder, data, **values):
  e = TinyGPT(**VALUES | values)
  e.validate()
  folder.mkdir(exist_ok=True)
  return Run(e, folder, data=data).trainer()


def trained(folder, data, *callbacks, **values):
  t = trainer_of(folder, data, **values)
  t.callbacks = [*callbacks, *t.callbacks]
  t.train(*t.store.initial())
  return runs.losses(folder)


def state_of(folder, step):
  return read_object(folder / f'checkpoints/checkpoint_{step:08d}/data/metadata')['rollouts']


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
  return trained(tmp_path_factory.mktemp('whole'), Own())


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_run_that_fails_continues_with_the_state_before_the_batch(tmp_path, whole):
  """The source has counted the batch that it could not make."""
  with pytest.raises(UserError, match='no more rollouts'):
    trained(tmp_path, Own(fails_at=4))
  assert state_of(tmp_path, 4) == {'count': 4}
  data = Own()
  found = trained(tmp_path, data)
  assert found == {step: loss for step, loss in whole.items() if step != 4}, 'as after any error'
  assert data.numbers == [4, 5]


@pytest.mark.slow
def test_a_run_continues_from_a_local_state(tmp_path, whole):
  values = dict(
    LOCAL_CHECKPOINT_EVERY_N_STEPS=2,
    LOCAL_CHECKPOINT_DIR=str(tmp_path / 'local'),
    CHECKPOINT_EVERY_N_STEPS=100,
  )

  class Killed(BaseException):
    pass

  class Killing(Callback):
    def after_step(self, state, step, metrics, loop):
      if step == 4:
        raise Killed

  with contextlib.suppress(Killed):
    trained(tmp_path / 'run', Own(), Killing(), **values)
  data = Own()
  assert trained(tmp_path / 'run', data, **values) == whole
  assert data.numbers[0] > 0


@pytest.mark.slow
def test_the_last_good_state_has_the_state_of_its_batch(tmp_path):
  with pytest.raises(TrainingError, match='had a non-finite gradient, from step 1 on'):
    trained(tmp_path, Own(poison=(1, 2)), MAX_SKIPPED_STEPS=2, CHECKPOINT_EVERY_N_STEPS=100)
  assert state_of(tmp_path, 1) == {'count': 1}


@pytest.mark.slow
def test_a_rollback_goes_on_with_new_rollouts(tmp_path):
  data = Own()
  trained(tmp_path, data, Back())
  assert data.numbers == list(range(8)), 'the steps 4 and 5 are done twice'
  assert state_of(tmp_path, 6) == {'count': 8}


@pytest.mark.cases(fast=0, slow=3)
@pytest.mark.slow
@pytest.mark.parametrize(
  ('change', 'message'),
  [
    (lambda batch: {**batch, 'ids': batch['ids'] + 128}, 'yields ids of 2'),
    (lambda batch: {**batch, 'reward': np.ones((1, 3))}, r'reward float64\[3\].* shapes\(\) say'),
    (lambda batch: None, 'type NoneType in place of a dict'),
  ],
)
def test_wrong_batches_are_refused(tmp_path, change, message):
  with pytest.raises(UserError, match=message):
    trained(tmp_path, Own(change))


@pytest.mark.slow
def test_a_state_that_is_not_json_is_refused(tmp_path):
  data = Own()
  data.state = lambda: {'count': np.zeros(2)}
  with pytest.raises(UserError, match=r'rollouts: its state\(\) must be JSON'):
    trained(tmp_path, data)


def test_what_needs_rows_by_number_is_refused(tmp_path):
  t = trainer_of(tmp_path, Own())
  t.store.save(t.store.initial()[0], 3, {})
  t.store.close()
  with pytest.raises(UserError, match='the checkpoint of step 3 has no state of rollouts'):
    trainer_of(tmp_path, Own()).resume(3)
  with pytest.raises(UserError, match='rollouts are for training'):
    Own().eval_batches(slice(0, 1))
  with pytest.raises(UserError, match='has rollouts, so its length is unknown'):
    max_steps(TinyGPT(NUM_EPOCHS=1.0), Own())


def test_an_evaluation_on_rollouts_is_refused_before_anything_is_built(tmp_path):
  class Evaluating(TinyGPT):
    def eval_inputs(self):
      return {'own': config(Own)}

  with pytest.raises(UserError, match='rollouts are for training; evaluate on other data'):
    Run(Evaluating(), tmp_path).trainer()


def test_a_program_is_planned_for_the_shapes(tmp_path):
  class OnOwn(TinyGPT):
    def train_input(self):
      return config(Own)

  e, notes = OnOwn(), []
  found = abstract_batch(e, e.mesh(jax.devices()[:1]), notes)
  assert {k: x.dtype.name for k, x in found.items()} == {
    'ids': 'int32', 'labels': 'int32', 'weights': 'float32',
    'segment_ids': 'int32', 'segment_pos': 'int32',
  }  # fmt: skip
  assert notes == []
