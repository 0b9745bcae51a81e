"""The best checkpoint is kept, and a run that does not get better ends, also after a restart."""

import json

import pytest

from paxlite.core.errors import UserError
from paxlite.programs.run import Run
from paxlite.programs.training import train
from paxlite.training.best import Best
from paxlite.training.callbacks import Callback
from tests.support import runs
from tests.support.experiments import TinyText


class Store:
  """Notes what is saved."""

  def __init__(self):
    self.saved = []

  def save(self, state, step, metadata, to):
    self.saved.append(step)


def evaluated(best, values, metric='avg_xent', first=10):
  store, lines = Store(), []
  for step, value in enumerate(values, 1):
    lines += best.evaluated(store, None, first * step, {'held_out': {metric: value}})
  return store.saved, lines


def test_the_best_is_saved_and_the_run_ends(tmp_path):
  best = Best(tmp_path, 'held_out', 'avg_xent', keeps=True, patience=2)
  saved, lines = evaluated(best, [3.0, 2.0, 2.5, 1.0, 1.0])
  assert saved == [10, 20, 40]
  assert not best.is_over
  assert lines[-1] == 'best so far: avg_xent 1.0000 at step 40, kept in best/'
  _, lines = evaluated(best, [4.0], first=60)
  assert best.is_over
  assert lines == [
    'Training ends early at step 60: no evaluation was better than step 40 '
    '(avg_xent 1.0000) in 2 (EARLY_STOPPING_PATIENCE)'
  ]


def test_of_accuracies_the_largest_is_the_best(tmp_path):
  name = 'fraction_of_correct_next_step_preds'
  best = Best(tmp_path, 'held_out', name, keeps=True, patience=0)
  assert evaluated(best, [0.1, 0.3, 0.2], name)[0] == [10, 20]
  with pytest.raises(UserError, match=r'BEST_METRIC=fraction\w+ is not a metric of the evaluation'):
    evaluated(best, [1.0], 'avg_xent')


def test_evaluations_before_a_restart_count(tmp_path):
  records = [(1, 3.0), (2, 2.0), (3, 2.5), (4, 2.4)]
  lines = [json.dumps({'step': s, 'input': 'held_out', 'avg_xent': v}) for s, v in records]
  (tmp_path / 'eval_metrics.jsonl').write_text('\n'.join([*lines, '{"st']))
  best = Best(tmp_path, 'held_out', 'avg_xent', keeps=False, patience=2)
  best.resume(3)
  assert (best.value, best.step, best.worse) == (2.0, 2, 1)
  best.resume(4)
  assert best.is_over


class Steps(Callback):
  def __init__(self):
    self.steps = []

  def on_evaluation(self, state, step, evaluations, summaries):
    assert int(state.step) == step
    self.steps.append((step, sorted(evaluations)))


@pytest.mark.slow
def test_a_run_with_all_of_it(tmp_path):
  """No loss is below that of the first step at this learning rate."""
  steps = Steps()

  class Experiment(TinyText):
    MAX_STEPS = 9
    EVAL_INTERVAL_STEPS = 1
    CHECKPOINT_EVERY_N_STEPS = 100
    KEEP_BEST = True
    EARLY_STOPPING_PATIENCE = 2
    LEARNING_RATE = 0.0
    SAMPLE_PROMPTS = ['In the', 'And']

    def callbacks(self):
      return [steps]

  for _ in range(2):  # the second call finds a run that is complete
    train(Run(Experiment(), tmp_path))
    assert steps.steps == [(step, ['held_out']) for step in (1, 2, 3)]
  assert [p.name for p in (tmp_path / 'best' / 'checkpoints').iterdir()] == ['checkpoint_00000001']
  assert (tmp_path / 'best' / 'experiment.json').is_file()
  assert [p.name for p in (tmp_path / 'checkpoints').iterdir()] == ['checkpoint_00000003']
  samples = runs.records(tmp_path, 'samples.jsonl')
  assert [(s['step'], s['prompt']) for s in samples] == [
    (step, prompt) for step in (1, 2, 3) for prompt in ('In the', 'And')
  ]
  assert all(s['text'].startswith(s['prompt']) for s in samples)
