"""A run whose folder is moved, deleted or replaced writes into no other run's folder."""

import concurrent.futures
import pathlib
import shutil
import subprocess
import sys

import pytest

from paxlite.core.errors import TrainingError
from paxlite.core.run_files import MovedError, check_place, open_file, write_file
from paxlite.experiments.registry import find
from paxlite.files.folder_lock import FolderLock
from paxlite.programs.run import Run
from paxlite.programs.training import train
from paxlite.tracking.writers import read_records
from tests.support import runs


def experiment(**changes):
  values = dict(NUM_LAYERS=1, MAX_STEPS=6, SUMMARY_INTERVAL_STEPS=1, PACKED_INPUT=False)
  return find('TinyGPT')(**values | changes)


def trained_while(monkeypatch, folder: pathlib.Path, act, at: int = 3) -> str:
  """Trains, and calls `act` before the metrics of step `at` are written; returns the error."""
  from paxlite.tracking import writers

  train_record = writers.TrainRecords.train

  def acting(self, step, record, scalars):
    if step == at:
      act()
    train_record(self, step, record, scalars)

  monkeypatch.setattr(writers.TrainRecords, 'train', acting)
  with pytest.raises(TrainingError) as raised:
    train(Run(experiment(), folder))
  monkeypatch.undo()
  return str(raised.value)


def steps(folder: pathlib.Path) -> list[str]:
  return sorted(p.name for p in (folder / 'checkpoints').glob('checkpoint_*'))


@pytest.mark.slow
def test_moved_and_another_run_begins_at_the_old_path(tmp_path, monkeypatch):
  folder, new = tmp_path / 'run', tmp_path / 'elsewhere' / 'moved'
  new.parent.mkdir()

  def move():
    folder.rename(new)
    folder.mkdir()
    (folder / '.lock').touch()
    (folder / 'metrics.jsonl').write_text('{"step": 1, "of": "another run"}\n')

  message = trained_while(monkeypatch, folder, move)
  assert message.startswith(f'--job_log_dir={folder}: it was moved to {new} while the run used it;')
  assert message.endswith(f'is saved in {new}: continue with --job_log_dir={new}')
  assert (folder / 'metrics.jsonl').read_text() == '{"step": 1, "of": "another run"}\n'
  assert {p.name for p in folder.iterdir()} == {'.lock', 'metrics.jsonl'}
  (saved,) = steps(new)
  train(Run(experiment(), new))
  assert steps(new) == [saved, 'checkpoint_00000005', 'checkpoint_00000006']


@pytest.mark.cases(fast=0, slow=2)
@pytest.mark.slow
@pytest.mark.parametrize('replaced', [False, True])
def test_deleted(tmp_path, monkeypatch, replaced):
  folder = tmp_path / 'run'

  def delete():
    shutil.rmtree(folder)
    if replaced:
      folder.mkdir()

  message = trained_while(monkeypatch, folder, delete)
  rescued = tmp_path / 'run.rescued'
  assert 'it was deleted while the run used it; step ' in message
  assert len(steps(rescued)) == 1
  assert not folder.exists() or not any(folder.iterdir())


def test_a_path_that_is_a_link(tmp_path, monkeypatch):
  """The link leads to another folder; the run's own stays where it is."""
  for name in ('a', 'b'):
    (tmp_path / name).mkdir()
  link = tmp_path / 'run'
  link.symlink_to('a')

  def relink():
    link.unlink()
    link.symlink_to('b')

  message = trained_while(monkeypatch, link, relink)
  assert f'it was moved to {tmp_path / "a"}' in message
  assert len(steps(tmp_path / 'a')) == 1
  assert not any((tmp_path / 'b').iterdir())


def test_nothing_is_written_to_a_path_that_leads_elsewhere(tmp_path):
  folder = tmp_path / 'run'
  folder.mkdir()
  lock = FolderLock(folder)
  lock.acquire()
  write_file(folder / 'a', b'before')
  (folder / '.lock').unlink()
  write_file(folder / 'a', b'a lock that is deleted is made again')
  assert (folder / '.lock').exists()
  folder.rename(tmp_path / 'moved')
  folder.mkdir()
  write_file(folder / 'b', b'follows the folder')
  assert (tmp_path / 'moved' / 'b').read_bytes() == b'follows the folder'
  with pytest.raises(MovedError, match=r'it was moved to .*moved while the run used it'):
    check_place(folder / 'checkpoints')
  shutil.rmtree(tmp_path / 'moved')
  with pytest.raises(MovedError, match='it was deleted while the run used it'):
    open_file(folder / 'below' / 'b', 'a')
  write_file(tmp_path / 'c', b'of nobody')
  lock.release()
  write_file(folder / 'a', b'of another run')


def test_threads_that_notice_a_deleted_lock_make_one(tmp_path):
  lock = FolderLock(tmp_path)
  lock.acquire()
  with concurrent.futures.ThreadPoolExecutor(8) as pool:
    for _ in range(50):
      (tmp_path / '.lock').unlink()
      for checked in [pool.submit(lock.check) for _ in range(8)]:
        checked.result()
  assert _in_another_process(tmp_path) == 'refused'
  lock.release()


def test_a_folder_of_checkpoints_that_two_runs_link_to(tmp_path):
  (tmp_path / 'disk').mkdir()
  for name in ('a', 'b'):
    (tmp_path / name).mkdir()
    (tmp_path / name / 'checkpoints').symlink_to(tmp_path / 'disk')
  held = FolderLock(tmp_path / 'a')
  held.acquire()
  assert _in_another_process(tmp_path / 'b') == 'refused'
  held.release()
  assert _in_another_process(tmp_path / 'b') == 'taken'


def _in_another_process(folder: pathlib.Path) -> str:
  """Takes the lock; POSIX locks of one process do not exclude each other."""
  code = (
    'import pathlib, sys; from paxlite.files.folder_lock import FolderLock\n'
    'FolderLock(pathlib.Path(sys.argv[1])).acquire()'
  )
  done = subprocess.run(
    [sys.executable, '-c', code, folder], cwd=runs.ROOT, capture_output=True, text=True
  )
  assert done.returncode == 0 or ' is in use by another run' in done.stderr
  return 'refused' if done.returncode else 'taken'


@pytest.mark.slow
def test_records_follow_the_folder(tmp_path, monkeypatch):
  folder, new = tmp_path / 'run', tmp_path / 'moved'
  trained_while(monkeypatch, folder, lambda: folder.rename(new))
  train(Run(experiment(), new))
  assert [r['step'] for r in read_records(new / 'metrics.jsonl')] == [1, 2, 3, 4, 5, 6]
