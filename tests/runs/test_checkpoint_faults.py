"""Runs on disks that fail: real processes lose no data, and no process waits for long."""

import errno
import os
import pathlib
import random
import re
import subprocess
import time

import pytest

from tests.support import failing_calls, runs
from tests.support.processes import start_processes, wait_for

pytestmark = [pytest.mark.slow, failing_calls.NEEDS_A_COMPILER]
TEXT = 'tests.support.experiments.TinyText'
FLAGS = '--fdl.MAX_STEPS=4', '--fdl.CHECKPOINT_EVERY_N_STEPS=2'


def contents(folder: pathlib.Path) -> dict[str, bytes]:
  """Returns the contents of the files that a run keeps: its checkpoints and its metrics."""
  kept = [*folder.glob('checkpoints/**/*'), folder / 'metrics.jsonl']
  return {str(p.relative_to(folder)): p.read_bytes() for p in kept if p.is_file()}


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
  ('call', 'path'),
  [('open', 'checksums.json'), ('read', 'state/params'), ('opendir', 'checkpoint_00000004/data')],
)
def test_a_disk_that_cannot_be_read_changes_nothing(tmp_path, call, path):
  folder, library = tmp_path / 'run', failing_calls.library(tmp_path)
  runs.run(folder, *FLAGS)
  before = contents(folder)
  more = '--fdl.MAX_STEPS=6', FLAGS[1]
  for number in (errno.EIO, errno.ESTALE, errno.EACCES):
    env = failing_calls.environment(library, call, path, number)
    told = runs.run(folder, *more, env=env, code=2).stderr.splitlines()[-1]
    assert told.startswith(f'error: {folder}/checkpoints/checkpoint_0000000')
    assert told.endswith(f'cannot be read: {os.strerror(number)}')
    assert contents(folder) == before
  done = runs.run(folder, *more)
  assert 'Continuing from the checkpoint of step 4.' in done.stdout
  assert list(runs.losses(folder)) == [1, 2, 3, 4, 5, 6]


@pytest.mark.exhaustive
def test_a_run_begins_again_only_when_it_is_told_to(tmp_path):
  runs.run(tmp_path, *FLAGS, config=TEXT)
  for manifest in tmp_path.glob('checkpoints/*/checksums.json'):
    manifest.unlink()
  before = contents(tmp_path)
  for mode in ('train', 'train', 'eval'):
    refused = runs.run(tmp_path, *FLAGS, f'--mode={mode}', config=TEXT, code=2)
    assert 'holds no good checkpoint:' in refused.stderr
    assert contents(tmp_path) == before
  done = runs.run(tmp_path, '--fdl.MAX_STEPS=2', '--start_over', config=TEXT)
  assert 'Continuing' not in done.stdout
  assert list(runs.losses(tmp_path)) == [1, 2]
  names = sorted(p.name for p in tmp_path.glob('checkpoints/*'))
  assert names == [
    'checkpoint_00000002', 'damaged_checkpoint_00000002', 'damaged_checkpoint_00000004',
  ]  # fmt: skip


@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.parametrize('number', [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_run_that_cannot_save_leaves_at_once(tmp_path, number):
  """Without a check, threads of Orbax would wait five minutes for a missing folder."""
  env = failing_calls.environment(
    failing_calls.library(tmp_path), 'mkdir', 'checkpoints/checkpoint_', number
  )
  began = time.monotonic()
  done = runs.run(tmp_path / 'run', *FLAGS, env=env, code=1)
  assert time.monotonic() - began < 120
  assert 'stopped: the last checkpoint was not saved: step 4: ' in done.stderr
  assert os.strerror(number) in done.stderr
  assert 'Traceback' not in done.stderr


def test_a_file_in_the_place_of_the_checkpoints(tmp_path):
  (tmp_path / 'checkpoints').write_text('')
  began = time.monotonic()
  done = runs.run(tmp_path, *FLAGS, code=None)
  assert time.monotonic() - began < 120
  assert done.returncode in (1, 2)
  assert 'Traceback' not in done.stderr


def test_the_last_save_fails_once_and_is_tried_again(tmp_path):
  env = failing_calls.environment(
    failing_calls.library(tmp_path), 'rename', 'checkpoint_00000003', errno.EBUSY, times=1
  )
  done = runs.run(tmp_path / 'run', '--fdl.MAX_STEPS=3', env=env)
  assert 'saving failed, training continues: step 3: ' in done.stderr
  assert 'step 3 was saved at the second attempt' in done.stderr
  assert (
    'Continuing from the checkpoint of step 3.'
    in runs.run(tmp_path / 'run', '--fdl.MAX_STEPS=4').stdout
  )


def test_no_record_is_lost_on_a_disk_that_has_space_again_at_the_last_save(tmp_path):
  folder, full = tmp_path / 'run', tmp_path / 'full'
  env = failing_calls.environment(
    failing_calls.library(tmp_path), 'write', str(folder), errno.ENOSPC, exists=str(full)
  )
  flags = '--fdl.MAX_STEPS=400', '--fdl.CHECKPOINT_EVERY_N_STEPS=1000'
  process = runs.started(
    runs.command(folder, *flags, '--fdl.SUMMARY_INTERVAL_STEPS=1', config=TEXT),
    runs.environment() | env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
  )  # fmt: skip
  wait_for(folder / 'metrics.jsonl')
  full.touch()
  said = ''
  for line in process.stderr:
    said += line
    if 'saving failed, training continues: step 400: ' in line:
      full.unlink()
  assert process.wait(60) == 0, said
  assert 'step 400 was saved at the second attempt' in said
  assert list(runs.losses(folder)) == list(range(1, 401))
  (evaluated,) = runs.records(folder, 'eval_metrics.jsonl')[-1:]
  assert evaluated['step'] == 400


@pytest.mark.exhaustive
def test_a_process_that_cannot_write_its_part_of_a_checkpoint_is_not_waited_for(tmp_path):
  """Orbax's own barrier would wait for it for twenty minutes."""
  env = failing_calls.environment(
    failing_calls.library(tmp_path), 'write', 'orbax-checkpoint-tmp/data', errno.ENOSPC, times=1
  )
  flags = '--fdl.MAX_STEPS=9', '--fdl.CHECKPOINT_EVERY_N_STEPS=3'
  started = start_processes(tmp_path / 'run', 2, *flags, config='TinyGPT', env=env)
  said = [process.communicate(timeout=150)[1] for process in started]
  assert [process.returncode for process in started] == [0, 0], said
  assert 'saving failed, training continues: step 3: No space left on device' in said[0]
  assert 'saving failed, training continues: step 3: OSError: process 0 could not' in said[1]
  saved = sorted(p.name for p in (tmp_path / 'run' / 'checkpoints').iterdir())
  assert saved == ['checkpoint_00000006', 'checkpoint_00000009']


SHORT_RUN = '--fdl.MAX_STEPS=6', '--fdl.CHECKPOINT_EVERY_N_STEPS=3', '--fdl.KEEP_BEST=True'


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
  """A run that nothing disturbed, with an evaluation and a sample."""
  folder = tmp_path_factory.mktemp('whole') / 'run'
  runs.run(folder, *SHORT_RUN, '--fdl.EVAL_INTERVAL_STEPS=3', config=TEXT)
  return folder


@pytest.mark.cases(fast=0, slow=2)
@pytest.mark.parametrize('number', range(4))
def test_a_full_disk_at_any_file_is_one_clear_line_and_nothing_is_lost(whole, tmp_path, number):
  """A file of a run cannot be written; then the disk has space again, and the run goes on."""
  files = (p.relative_to(whole).as_posix() for p in whole.rglob('*') if p.is_file())
  kinds = {re.sub(r'(checkpoint_|events|process_).*', r'\1', name) for name in files}
  # nothing is said of these, which the next save or step writes again
  kinds -= {'.lock', '.saved.json'} | {name for name in kinds if name.startswith('goodput/')}
  name = random.Random(0).sample(sorted(kinds), 4)[number]
  folder = tmp_path / 'run'
  env = failing_calls.environment(
    failing_calls.library(tmp_path), 'write', f'{folder}/{name}', errno.ENOSPC
  )
  flags = *SHORT_RUN, '--fdl.EVAL_INTERVAL_STEPS=3'
  done = runs.ended(runs.command(folder, *flags, config=TEXT), runs.environment() | env)
  assert done.returncode in (0, 1, 2), done.stderr
  assert 'Traceback' not in done.stderr, name
  assert 'defect' not in done.stderr, name
  assert 'No space left on device' in done.stderr, name
  if done.returncode:
    assert re.match('stopped: |error: ', done.stderr.splitlines()[-1]), (name, done.stderr)
  runs.run(folder, *flags, config=TEXT)
  compared = {'metrics.jsonl': 'loss', 'eval_metrics.jsonl': 'avg_xent'}
  if compared.pop(name, None):  # no step is repeated for records that the disk took at no time
    assert f'{folder / name} cannot be written, training continues' in done.stderr
  for file, value in compared.items():
    found, expected = ([r[value] for r in runs.records(f, file)] for f in (folder, whole))
    assert found == expected, (name, file)
