"""A run whose checkpoints are gone is not taken for a new one."""

import os
import shutil
import time

import pytest

from paxlite.checkpointing.saved_record import SavedRecord
from paxlite.core.errors import UserError
from paxlite.experiments.registry import find
from paxlite.programs import library
from paxlite.programs.evaluation import evaluate
from paxlite.programs.run import Run
from paxlite.programs.training import train
from paxlite.tracking.writers import read_records
from tests.support.experiments import TinyText


def tiny(MAX_STEPS=2, **changes):
  return find('TinyGPT')(
    NUM_LAYERS=1, MAX_STEPS=MAX_STEPS, SUMMARY_INTERVAL_STEPS=1, PACKED_INPUT=False, **changes
  )


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
  folder = tmp_path_factory.mktemp('run')
  train(Run(tiny(), folder))
  return folder


@pytest.fixture
def run(trained, tmp_path):
  return Run(tiny(MAX_STEPS=3), shutil.copytree(trained, tmp_path / 'run'))


def deleted(folder, tmp_path):
  shutil.rmtree(folder)


def empty_mount_point(folder, tmp_path):
  shutil.rmtree(folder)
  folder.mkdir()


def elsewhere(folder, tmp_path):
  (tmp_path / 'other').mkdir()
  shutil.rmtree(folder)
  folder.symlink_to(tmp_path / 'other')


@pytest.mark.parametrize('lose', [deleted, empty_mount_point, elsewhere])
def test_it_is_refused_and_nothing_is_lost(run, tmp_path, lose):
  checkpoints = run.folder / 'checkpoints'
  lose(checkpoints, tmp_path)
  before = sorted(run.folder.rglob('*'))
  records = (run.folder / 'metrics.jsonl').read_bytes()
  message = (
    rf'this run saved the checkpoint of step 2, but {checkpoints} holds no checkpoints: put them '
    'back or .*--start_over'
  )
  with pytest.raises(UserError, match=message):
    train(run)
  restored = TinyText(CHECKPOINT_RESTORE_PATH='/weights')
  with pytest.raises(UserError, match=message):  # and not the weights that it began with
    evaluate(Run(restored, run.folder))
  assert sorted(run.folder.rglob('*')) == before
  assert (run.folder / 'metrics.jsonl').read_bytes() == records


def test_a_link_to_nowhere_is_named(run, tmp_path):
  checkpoints = run.folder / 'checkpoints'
  checkpoints.rename(tmp_path / 'away')
  checkpoints.symlink_to(tmp_path / 'disk')
  with pytest.raises(
    UserError, match=f'{checkpoints} is a link to {tmp_path}/disk, which does not'
  ):
    train(run)
  (tmp_path / 'away').rename(tmp_path / 'disk')
  train(run)
  link = tmp_path / 'link'
  link.symlink_to(tmp_path / 'unmounted' / 'run')
  with pytest.raises(
    UserError, match=f'{link} is a link to .*/unmounted/run, which does not exist'
  ):
    train(Run(tiny(), link))


@pytest.mark.slow
def test_ways_to_begin_again(run, capsys):
  """--start_over says so; a folder without experiment.json holds no run; nothing was saved."""
  shutil.rmtree(run.folder / 'checkpoints')
  train(Run(run.experiment, run.folder, start_over=True))
  assert 'No state of the 2 steps in metrics.jsonl was saved' in capsys.readouterr().out
  assert [r['step'] for r in read_records(run.folder / 'metrics.jsonl')] == [1, 2, 3]
  for path in run.folder.iterdir():
    if not path.name.startswith('.'):
      shutil.rmtree(path) if path.is_dir() else path.unlink()
  train(Run(run.experiment, run.folder, save=False))
  train(Run(run.experiment, run.folder))  # `save=False` saved nothing


def test_records_that_are_lost_are_noticed(run, capsys):
  records = run.folder / 'metrics.jsonl'
  records.write_bytes(records.read_bytes().splitlines(keepends=True)[0])
  train(run)
  assert 'metrics.jsonl has no record of step 2: it was lost' in capsys.readouterr().out


def test_the_record_of_an_earlier_version_is_made_up_for(run):
  record = run.folder / '.saved.json'
  record.unlink()
  train(run)
  assert record.exists()
  assert library.load(run.folder).folder == run.folder
  assert os.listdir(run.folder / 'checkpoints')


def test_a_save_that_does_not_end_is_not_looked_for_at_each_step(tmp_path, monkeypatch):
  now = 100.0
  monkeypatch.setattr(time, 'monotonic', lambda: now)
  record = SavedRecord(tmp_path)
  assert not record.is_due(None)
  assert [record.is_due(3) for _ in range(9)] == [True] + [False] * 8
  now += 2
  assert record.is_due(3)
  record.note([3])
  now += 2
  assert not record.is_due(3)
