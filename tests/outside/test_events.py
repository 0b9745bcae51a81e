"""A tracker, a listener, a dataset and a source of rollouts, each added from outside."""

import csv
import json

import fiddle as fdl
import jax
import numpy as np
import pytest
from flax.linen import meta

from tests.outside.parts.rollouts import OnRollouts
from tests.outside.trained import trained, trained_on_one
from tests.support import runs
from tests.support.processes import on_processes


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_tracker_receives_the_numbers(tmp_path):
  losses = trained(tmp_path, 'tracker.WithCsv')
  rows = list(csv.reader((tmp_path / 'numbers.csv').open()))
  assert {int(r[0]): float(r[2]) for r in rows if r[1] == 'train'} == losses
  assert [r[0] for r in rows if r[1] == 'same'] == ['2', '4']


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_tracker_of_a_run_that_goes_on_repeats_nothing(tmp_path):
  trained(tmp_path, 'tracker.WithCsv', '--fdl.MAX_STEPS=2')
  losses = trained(tmp_path, 'tracker.WithCsv')
  rows = list(csv.reader((tmp_path / 'numbers.csv').open()))
  assert [(int(r[0]), float(r[2])) for r in rows if r[1] == 'train'] == list(losses.items())


@pytest.mark.slow
def test_a_listener_hears_all_events_and_ends_the_run(tmp_path):
  log = tmp_path / 'events.txt'
  losses = trained(tmp_path / 'run', 'listener.WithBudget', f'--fdl.EVENT_LOG={log}')
  assert list(losses) == [1, 2, 3, 4]
  assert log.read_text().splitlines() == [
    'resume 0', 'resume 0', 'start 0',
    'before 0', 'after 1',
    'before 1', 'after 2', 'save 2',
    'before 2', 'after 3', 'evaluation 3 []',
    'before 3', 'after 4', 'save 4', 'end 4', 'close',
  ]  # fmt: skip
  (found,) = runs.records(tmp_path / 'run', 'eval_metrics.jsonl')
  assert found == {'step': 4, 'input': 'budget', 'tokens_left': 0.0}


@pytest.mark.slow
def test_rollouts_depend_on_the_parameters():
  e = OnRollouts()
  task = fdl.build(e.build_task())
  init = jax.jit(lambda key: meta.unbox(task.init(key)).params)
  first, second = (init(jax.random.key(seed)) for seed in (0, 1))
  rows = slice(0, e.batch_size)
  drawn = []
  for params in (first, second, first):
    data = fdl.build(e.train_input())
    drawn.append([data.next_batch(params, n, rows)['labels'] for n in range(2)])
  assert (drawn[0][0] != drawn[1][0]).mean() > 0.03, 'the key is the same'
  assert (drawn[0][0] != drawn[0][1]).mean() > 0.3, 'the state has gone on'
  np.testing.assert_array_equal(drawn[0], drawn[2])


@pytest.mark.exhaustive
def test_a_run_on_rollouts_that_goes_on_equals_one_that_was_not_stopped(tmp_path):
  whole = trained(tmp_path / 'whole', 'rollouts.OnRollouts')
  trained(tmp_path / 'stopped', 'rollouts.OnRollouts', '--fdl.MAX_STEPS=4')
  assert trained(tmp_path / 'stopped', 'rollouts.OnRollouts') == whole
  assert list(whole) == [1, 2, 3, 4, 5, 6]
  path = tmp_path / 'stopped' / 'checkpoints' / 'checkpoint_00000004' / 'data' / 'metadata'
  assert json.loads(path.read_text())['rollouts'] == {'sampled': 4}
  slower = trained(tmp_path / 'slower', 'rollouts.OnRollouts', '--fdl.LEARNING_RATE=0.001')
  assert slower[1] == whole[1]
  assert slower[6] != whole[6]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_dataset_is_trained_on(tmp_path):
  losses = trained(tmp_path / 'mesh', 'dataset.Counting')
  assert losses[30] < 0.8 * losses[1]
  one = trained_on_one(tmp_path / 'one', 'dataset.Counting', 32, '--fdl.MAX_STEPS=3')
  assert one[3] == pytest.approx(losses[3], rel=1e-4)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_rollouts_on_two_processes(tmp_path):
  """Each gives its rows of what both have sampled, also after a restart."""
  config = 'tests.outside.parts.rollouts.OnRollouts'
  on_processes(tmp_path / 'one', 1, config=config)
  on_processes(tmp_path / 'two', 2, '--fdl.MAX_STEPS=4', config=config)
  on_processes(tmp_path / 'two', 2, config=config)
  assert runs.losses(tmp_path / 'two') == pytest.approx(runs.losses(tmp_path / 'one'), rel=1e-5)
