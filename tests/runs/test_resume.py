"""A run that is killed and started again equals an undisturbed run bit for bit."""

import json
import shutil
import signal

import numpy as np
import pytest

from tests.support import runs
from tests.support.processes import SHORT, final_state


@pytest.fixture(scope='module')
def uninterrupted(tmp_path_factory):
  folder = tmp_path_factory.mktemp('uninterrupted')
  runs.run(folder, *SHORT)
  return folder


def start_and_be_killed(folder, moment):
  killed = runs.run(
    folder, *SHORT, module='tests.support.killed_main', env={'KILL_AT': moment}, code=None
  )
  assert killed.returncode == -signal.SIGKILL, killed.stderr


@pytest.mark.cases(fast=1, slow=1)
@pytest.mark.parametrize(
  ('moments', 'resumed_at'),
  [
    pytest.param(['during_save:3'], [None], marks=pytest.mark.slow),
    (['during_save:6'], [3]),
    pytest.param(['mid_save:6'], [3], marks=pytest.mark.slow),
    pytest.param(['after_save:3', 'configuration'], [3], marks=pytest.mark.slow),
    # The save of step 6 runs in the background.
    pytest.param(['before_step:8'], [3, 6], marks=pytest.mark.slow),
    pytest.param(
      ['before_step:4', 'during_save:6', 'before_step:9'], [3, 6], marks=pytest.mark.slow
    ),
  ],
)
def test_kill_9(uninterrupted, tmp_path, moments, resumed_at):
  for moment in moments:
    start_and_be_killed(tmp_path, moment)
  output = runs.run(tmp_path, *SHORT).stdout
  found = [s for s in range(1, 11) if f'Continuing from the checkpoint of step {s}.' in output]
  assert (found or [None])[0] in resumed_at
  assert runs.losses(tmp_path) == runs.losses(uninterrupted)
  assert [r['step'] for r in runs.records(tmp_path)] == list(range(1, 11))
  mine, other = final_state(tmp_path), final_state(uninterrupted)
  assert mine.keys() == other.keys()
  assert len(mine) > 40
  for name, value in mine.items():
    np.testing.assert_array_equal(value, other[name], err_msg=name)


def test_a_complete_run_says_so(uninterrupted):
  assert 'Training is complete: step 10 of 10.' in runs.run(uninterrupted, *SHORT).stdout


def flip_a_bit(path):
  data = bytearray(path.read_bytes())
  data[len(data) // 2] ^= 0x10
  path.write_bytes(data)


@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.parametrize(
  'damage', ['bit', 'no manifest', 'truncated', 'no file', 'bad manifest', 'empty manifest']
)
@pytest.mark.slow
def test_a_damaged_checkpoint_is_reported_and_the_one_before_used(uninterrupted, tmp_path, damage):
  runs.run(tmp_path, *SHORT, '--fdl.MAX_STEPS=7')
  step = tmp_path / 'checkpoints' / 'checkpoint_00000007'
  chunks = sorted(p for p in (step / 'state').glob('params.*/*') if p.name.startswith('0'))
  match damage:
    case 'bit':
      flip_a_bit(chunks[0])
    case 'truncated':
      chunks[0].write_bytes(chunks[0].read_bytes()[:-1])
    case 'no file':
      chunks[0].unlink()
    case 'no manifest':
      (step / 'checksums.json').unlink()
    case 'bad manifest':
      (step / 'checksums.json').write_text('{"a": 5}')
    case 'empty manifest':
      (step / 'checksums.json').write_text('{}')
  result = runs.run(tmp_path, *SHORT)
  assert 'checkpoint of step 7: ' in result.stderr
  assert 'damaged_checkpoint_00000007' in result.stderr
  assert 'Continuing from the checkpoint of step 6.' in result.stdout
  assert runs.losses(tmp_path) == runs.losses(uninterrupted)
  assert (tmp_path / 'checkpoints' / 'damaged_checkpoint_00000007').is_dir()


@pytest.mark.parametrize(
  ('flag', 'message'),
  [
    ('--fdl.LEARNING_RATE=1', 'LEARNING_RATE 0.0006 → 1.0'),
    pytest.param('--fdl.MODEL_DIMS=64', 'MODEL_DIMS 32 → 64', marks=pytest.mark.slow),
    pytest.param('--fdl.SEED=1', 'SEED 1234 → 1', marks=pytest.mark.slow),
  ],
)
def test_a_folder_of_another_experiment_is_refused(uninterrupted, flag, message):
  before = {p: p.stat().st_mtime_ns for p in uninterrupted.rglob('*')}
  result = runs.run(uninterrupted, *SHORT, flag, code=2)
  assert 'holds checkpoints of a different experiment' in result.stderr
  assert message in result.stderr
  assert result.stderr.count('\n') == 1
  assert before == {p: p.stat().st_mtime_ns for p in uninterrupted.rglob('*')}


def test_accepted_changes_must_still_fit(uninterrupted):
  result = runs.run(uninterrupted, *SHORT, '--fdl.MODEL_DIMS=64', '--accept_changes', code=2)
  assert 'does not fit this experiment' in result.stderr
  assert 'float32[128, 32] and the model has float32[128, 64]' in result.stderr


def test_another_global_batch_is_refused(uninterrupted):
  flags = '--fdl.MAX_STEPS=12', '--fdl.PERCORE_BATCH_SIZE=8'
  result = runs.run(uninterrupted, *SHORT, *flags, code=2)
  assert 'global batch of 4, but this run has 8' in result.stderr


@pytest.mark.exhaustive
@pytest.mark.slow
def test_evaluation_leaves_a_run_in_progress_alone(tmp_path):
  """Records after the checkpoint stay, and so do an unfinished save and a damaged step."""
  config = 'tests.support.experiments.TinyText'
  runs.run(tmp_path, '--fdl.CHECKPOINT_EVERY_N_STEPS=4', config=config)
  saves = tmp_path / 'checkpoints'
  flip_a_bit(saves / 'checkpoint_00000010' / 'state' / '_METADATA')
  (saves / 'checkpoint_00000012.orbax-checkpoint-tmp').mkdir()
  before = sorted(tmp_path.rglob('*')), runs.records(tmp_path)
  flags = '--mode=eval', '--fdl.EVAL_BATCH_SIZE=2', '--noenable_checkpoint_saving'
  result = runs.run(tmp_path, *flags, config=config)
  assert 'eval held_out at step 8: loss' in result.stdout
  assert 'checkpoint of step 10: state/_METADATA is damaged' in result.stderr
  new = [p for p in sorted(tmp_path.rglob('*')) if p not in before[0]]
  assert all('summaries/eval_held_out' in str(p) for p in new), new
  assert runs.records(tmp_path) == before[1]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_without_saving_a_run_still_continues(tmp_path):
  runs.run(tmp_path, *SHORT)
  out = runs.run(tmp_path, *SHORT, '--fdl.MAX_STEPS=11', '--noenable_checkpoint_saving').stdout
  assert 'Continuing from the checkpoint of step 10.' in out
  assert not (tmp_path / 'checkpoints' / 'checkpoint_00000011').exists()


def test_an_attribute_newer_than_the_run_is_no_difference(uninterrupted, tmp_path):
  shutil.copytree(uninterrupted, tmp_path / 'run')
  path = tmp_path / 'run' / 'experiment.json'
  recorded = json.loads(path.read_text())
  del recorded['values']['HEADS_SPAN_MODEL']
  path.write_text(json.dumps(recorded))
  assert 'complete' in runs.run(tmp_path / 'run', *SHORT).stdout
