"""Metrics reach trackers without a network, and a tracker that fails stops nothing."""

import sqlite3
import time

import pytest

from paxlite.core.errors import UserError
from paxlite.training import trackers
from paxlite.training.summaries import Summaries

SCALARS = {
  'Metrics/total_loss': 2.5,
  'learning/lr': 0.1,
  'learning/raw_grad_norm': 1.0,
  'learning/skipped_steps': 0.0,
}
SPEED = dict.fromkeys(('tokens_per_second', 'step_seconds', 'model_tflops', 'mfu'))


@pytest.fixture
def offline(tmp_path, monkeypatch):
  """Lets every tracker write below tmp_path."""
  monkeypatch.setenv('WANDB_MODE', 'offline')
  monkeypatch.setenv('WANDB_SILENT', 'true')
  monkeypatch.setenv('MLFLOW_TRACKING_URI', f'file://{tmp_path}/mlflow')
  monkeypatch.setenv('MLFLOW_ALLOW_FILE_STORE', 'true')
  monkeypatch.setenv('TRACKIO_DIR', str(tmp_path / 'trackio'))


def reported(folder, kind, steps) -> None:
  (tracker,) = trackers.trackers([kind], folder, 'Project', {'NUM_LAYERS': 2, 'NAMES': ['a', 'b']})
  summaries = Summaries(folder, 10, trackers=[tracker])
  for step in steps:
    summaries.train(step, {**SCALARS, 'Metrics/total_loss': 10.0 - step}, SPEED)
  summaries.result(steps[-1], 'held_out', {'avg_xent': 3.5}, 'text')
  summaries.close()


@pytest.mark.slow
def test_mlflow_has_the_numbers_of_a_run_that_continued(tmp_path, offline):
  from mlflow import MlflowClient

  folder = tmp_path / 'run'
  folder.mkdir()
  reported(folder, 'mlflow', [1, 2])
  reported(folder, 'mlflow', [3])
  client = MlflowClient()
  (run,) = client.search_runs([client.get_experiment_by_name('Project').experiment_id])
  history = client.get_metric_history(run.info.run_id, 'train/loss')
  assert [(m.step, m.value) for m in history] == [(1, 9), (2, 8), (3, 7)]
  assert run.data.params == {'NUM_LAYERS': '2', 'NAMES': "['a', 'b']"}
  assert run.data.metrics['eval_held_out/avg_xent'] == 3.5
  assert run.info.status == 'FINISHED'


@pytest.mark.slow
def test_trackio_has_the_numbers_of_a_run_that_continued(tmp_path, offline):
  folder = tmp_path / 'run'
  folder.mkdir()
  reported(folder, 'trackio', [1, 2])
  reported(folder, 'trackio', [3])
  with sqlite3.connect(tmp_path / 'trackio' / 'Project.db') as database:
    rows = database.execute('SELECT step, metrics FROM metrics ORDER BY id').fetchall()
  losses = {step: text for step, text in rows if 'train/loss' in str(text)}
  assert list(losses) == [1, 2, 3]


@pytest.mark.slow
def test_wandb_keeps_a_file_to_send_later(tmp_path, offline):
  folder = tmp_path / 'run'
  folder.mkdir()
  reported(folder, 'wandb', [1, 2])
  (kept,) = (folder / 'wandb').glob('offline-run-*/run-*.wandb')
  until = time.monotonic() + 30  # a process of wandb writes the file, maybe after the run's end
  while b'train/loss' not in (content := kept.read_bytes()) and time.monotonic() < until:
    time.sleep(0.1)
  assert b'train/loss' in content
  assert b'eval_held_out/avg_xent' in content


def test_a_tracker_that_fails_stops_nothing(tmp_path, caplog):
  class Failing(trackers.Tracker):
    name = 'wandb'

    def _start(self) -> None:
      raise RuntimeError('the server is gone')

    def _log(self, step, numbers) -> None:
      raise AssertionError('there is no run')

    def _end(self) -> None:
      raise AssertionError('there is no run')

  summaries = Summaries(tmp_path, 10, trackers=[Failing(tmp_path, 'Project', {})])
  for step in (1, 2):
    summaries.train(step, SCALARS, SPEED)
  summaries.close()
  assert caplog.messages == ['wandb failed, training continues: the server is gone']
  assert len((tmp_path / 'metrics.jsonl').read_text().splitlines()) == 2


def test_a_tracker_that_is_not_installed(tmp_path, monkeypatch):
  monkeypatch.setattr(trackers.importlib.util, 'find_spec', lambda name: None)
  with pytest.raises(UserError, match=r'TRACKERS has mlflow, which is not installed: pip install'):
    trackers.trackers(['mlflow'], tmp_path, 'Project', {})
