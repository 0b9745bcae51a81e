"""Metrics reach trackers without a network; one that cannot start ends a run, and no other does."""

import sqlite3
import threading
import time

import pytest

from paxlite.core.errors import UserError
from paxlite.trackers import services as trackers
from paxlite.tracking.summaries import Summaries
from paxlite.tracking.writers import started

SCALARS = {
  'Metrics/total_loss': 2.5, 'learning/lr': 0.1, 'learning/raw_grad_norm': 1.0,
  'learning/skipped_steps': 0.0,
}  # fmt: skip
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
  summaries.start()
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
def test_trackio_has_the_numbers_of_a_run_that_continued(tmp_path, offline, monkeypatch):
  from trackio import sqlite_storage  # which reads the variable once, as trl may have made it do

  monkeypatch.setattr(sqlite_storage, 'TRACKIO_DIR', tmp_path / 'trackio')
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


class Recorded(trackers.Tracker):
  """Notes what is sent, in place of a service; a test may replace what a method does."""

  name = 'wandb'
  way_out = 'It needs a key'

  def __init__(self, *args):
    super().__init__(*args)
    self.sent = []

  def _start(self) -> None:
    self.sent.append('start')

  def _log(self, step, numbers) -> None:
    self.sent.append(step)

  def _end(self) -> None:
    self.sent.append('end')


class Absent(Recorded):
  def _start(self) -> None:
    raise RuntimeError('no key is configured.\n  Log in, or\nset KEY')


class Failing(Recorded):
  def _log(self, step, numbers) -> None:
    raise RuntimeError('the server is gone:\n' + 100 * 'x')


class Hanging(Recorded):
  end_seconds = 0.2

  def __init__(self, *args):
    super().__init__(*args)
    self.answers = threading.Event()

  def _log(self, step, numbers) -> None:
    self.answers.wait()
    super()._log(step, numbers)


def sent_by(kind: type[Recorded], folder) -> Recorded:
  """Reports two steps to a tracker; returns it."""
  tracker = kind(folder, 'Project', {})
  with started([tracker]):
    summaries = Summaries(folder, 10, trackers=[tracker])
    summaries.start()
    for step in (1, 2):
      summaries.train(step, SCALARS, SPEED)
    summaries.close()
  return tracker


def test_a_tracker_starts_and_ends_once(tmp_path):
  assert sent_by(Recorded, tmp_path).sent == ['start', 1, 2, 'end']


def test_a_tracker_that_cannot_start_is_an_error_with_the_whole_reason(tmp_path):
  first = Recorded(tmp_path, 'Project', {})
  with pytest.raises(UserError) as error, started([first, Absent(tmp_path, 'Project', {})]):
    raise AssertionError('the run begins')
  assert str(error.value) == (
    'TRACKERS has wandb, which cannot start: no key is configured. Log in, or set KEY. '
    "It needs a key; 'TRACKERS=[]' trains without it"
  )
  assert first.sent == ['start', 'end']


def test_a_tracker_that_fails_later_stops_nothing(tmp_path, caplog):
  assert sent_by(Failing, tmp_path).sent == ['start', 'end']
  assert caplog.messages == [f'wandb failed, training continues: the server is gone: {100 * "x"}']
  assert len((tmp_path / 'metrics.jsonl').read_text().splitlines()) == 2


def test_a_tracker_that_does_not_answer_holds_up_no_step(tmp_path, caplog, monkeypatch):
  monkeypatch.setattr(trackers, '_MOST_WAITING', 1)
  tracker = sent_by(Hanging, tmp_path)  # would not return
  assert 'wandb does not answer: its last numbers are not sent' in caplog.messages
  tracker.answers.set()


@pytest.mark.slow  # imports MLflow
def test_mlflow_without_a_server_writes_to_a_folder(tmp_path, monkeypatch):
  """mlflow-skinny has no database, and refuses folders unless it is told."""
  pytest.importorskip('mlflow')
  monkeypatch.setattr(trackers.importlib.util, 'find_spec', lambda name: None)
  monkeypatch.delenv('MLFLOW_TRACKING_URI', raising=False)
  monkeypatch.delenv('MLFLOW_ALLOW_FILE_STORE', raising=False)
  monkeypatch.chdir(tmp_path)
  with started([trackers.MlflowTracker(tmp_path, 'Project', {'NUM_LAYERS': 2})]):
    assert (tmp_path / 'mlruns').is_dir()


def test_a_tracker_that_is_not_installed(tmp_path, monkeypatch):
  monkeypatch.setattr(trackers.importlib.util, 'find_spec', lambda name: None)
  with pytest.raises(UserError, match=r'TRACKERS has mlflow, which is not installed: pip install'):
    trackers.trackers(['mlflow'], tmp_path, 'Project', {})
