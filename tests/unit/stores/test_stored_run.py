"""A run in a bucket, in this process; tests/runs/test_stores.py starts and disturbs others."""

import json
import pathlib

import numpy as np
import pytest

from paxlite.core.errors import TrainingError, UserError
from paxlite.experiments.demo import TinyGPT
from paxlite.files.folder_lock import FolderLock
from paxlite.processes.hosts import Hosts
from paxlite.programs.run import Run
from paxlite.programs.run_folder import twin
from paxlite.programs.training import train
from paxlite.report.records import read_runs
from paxlite.stores import stored_run
from tests.support import runs
from tests.support.proxy import proxy

PLACE = 'gs://bkt/runs/one'


def experiment(steps):
  return TinyGPT(
    MAX_STEPS=steps, NUM_LAYERS=1, CHECKPOINT_EVERY_N_STEPS=2, SUMMARY_INTERVAL_STEPS=1
  )


@pytest.mark.slow
def test_a_run_continues_on_another_machine(gcs, tmp_path, monkeypatch):
  monkeypatch.setattr(stored_run, '_LOOK_SECONDS', 0.05)
  for machine, steps in (('a', 3), ('b', 4)):
    folder = twin(PLACE, str(tmp_path / machine))
    train(Run(experiment(steps), folder, address=PLACE))
  train(Run(experiment(4), tmp_path / 'folder'))
  (stored,) = read_runs([PLACE])
  assert runs.losses(stored.folder) == runs.losses(tmp_path / 'folder')
  assert stored.goodput.attempts == 2
  content = {k.removeprefix('runs/one/'): v for k, (_, v) in gcs.objects['bkt'].items()}
  steps = {k.split('/')[1] for k in content if k.endswith('checksums.json')}
  assert steps == {f'checkpoint_{step:08d}' for step in (2, 3, 4)}
  assert json.loads(content['lease.json'])['released']
  with pytest.raises(UserError, match='a different experiment: NUM_LAYERS 1 → 2'):
    train(Run(experiment(7).replaced(NUM_LAYERS=2), folder, address=PLACE))
  assert json.loads(gcs.objects['bkt']['runs/one/lease.json'][1])['released']


@pytest.fixture(autouse=True)
def rarely(monkeypatch):
  monkeypatch.setattr(stored_run, '_LOOK_SECONDS', 1000)  # only when a test looks


def stored(tmp_path):
  return stored_run.StoredRun(PLACE, tmp_path, 2, FolderLock(tmp_path))


def test_a_full_disk_is_named_and_not_the_bucket(gcs, tmp_path, monkeypatch):
  full = pathlib.Path('/dev/full')
  monkeypatch.setattr(stored_run, 'write_file', lambda path, content: full.write_bytes(content))
  with pytest.raises(TrainingError, match=f'^{tmp_path}: No space left on device$'):
    stored(tmp_path).__enter__()


def test_without_its_lease_a_run_writes_nothing(gcs, tmp_path):
  """Its records would replace those of the run that has taken over."""
  with stored(tmp_path) as run:
    renewed_at, run._lease._renewed_at = run._lease._renewed_at, -float('inf')
    (tmp_path / 'metrics.jsonl').write_text('{}')
    with pytest.raises(OSError, match='the lease could not be renewed in time'):
      run._look(mirrors=True)
    assert 'runs/one/metrics.jsonl' not in gcs.objects['bkt']
    run._lease._renewed_at = renewed_at
  assert 'runs/one/metrics.jsonl' in gcs.objects['bkt']


def test_a_checkpoint_that_cannot_be_copied_holds_nothing_else_up(gcs, tmp_path, monkeypatch):
  def fail():
    raise TimeoutError('host 1 has not copied its part')

  with stored(tmp_path) as run:
    with monkeypatch.context() as m:
      m.setattr(run._steps[0], 'look', fail)
      (tmp_path / 'metrics.jsonl').write_text('{}')
      with pytest.raises(TimeoutError, match='host 1'):
        run._look(mirrors=True)
    assert 'runs/one/metrics.jsonl' in gcs.objects['bkt']


def test_a_part_of_a_best_checkpoint_is_moved_aside(gcs, tmp_path, monkeypatch):
  run = stored(tmp_path)
  run.hosts = Hosts(index=0, count=2, leads=True)
  for step in (10, 20):
    (tmp_path / f'best/checkpoints/checkpoint_{step:08d}').mkdir(parents=True)
  of_another = np.array([10, -1, -1, -1], np.int32)
  monkeypatch.setattr(stored_run, 'gathered', lambda own: lambda: np.stack([own, of_another]))
  run._leave_parts_of_the_best()
  left = sorted(p.name for p in (tmp_path / 'best/checkpoints').iterdir())
  assert left == ['checkpoint_00000010', 'left_checkpoint_00000020']


def test_a_page_for_a_list_does_not_begin_the_run_again(gcs, tmp_path, monkeypatch):
  """A list that is not one seems to be empty; the metrics of the store would be overwritten."""
  with stored(tmp_path / 'a'):
    (tmp_path / 'a/metrics.jsonl').write_text('{"step": 1}')
  with proxy(gcs.endpoint, mode='list-page') as between:
    monkeypatch.setenv('GOOGLE_BASE_URL', between.endpoint)
    for folder in ('a', 'b'):
      with (
        pytest.raises(UserError, match='the server is not an object store'),
        stored(tmp_path / folder),
      ):
        pass
  assert gcs.objects['bkt']['runs/one/metrics.jsonl'][1] == b'{"step": 1}'


def test_a_run_below_markers_of_folders(gcs, tmp_path):
  for marker in ('runs/', 'runs/one/', 'runs/one/checkpoints/', 'runs/one/best/checkpoints/'):
    gcs.put(f'/bkt/{marker}')
  for folder in ('a', 'b'):
    with stored(tmp_path / folder):
      (tmp_path / folder / 'metrics.jsonl').write_text(f'"{folder}"')
  assert gcs.objects['bkt']['runs/one/metrics.jsonl'][1] == b'"b"'
