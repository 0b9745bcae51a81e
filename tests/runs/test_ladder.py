"""A ladder of small models, as its command trains it."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.support import runs

VALUES = (
  'NUM_LAYERS=2', 'MODEL_DIMS=64', 'NUM_HEADS=8', 'HIDDEN_DIMS=128', 'MAX_SEQ_LEN=32',
  'MAX_STEPS=12', 'MAX_EVAL_BATCHES=2', 'CHECKPOINT_EVERY_N_STEPS=6',
)  # fmt: skip
RUNGS = '--rungs=8x1,16x1,24x1,32x2'


def ladder(folder, *flags: str, code: int = 0) -> str:
  result = runs.module(
    'paxlite', 'ladder', 'DemoGPT', f'--folder={folder}', *VALUES, *flags, code=code
  )
  return result.stdout + result.stderr


@pytest.fixture(scope='module')
def climbed(tmp_path_factory):
  folder = tmp_path_factory.mktemp('ladder') / 'small'
  return folder, ladder(folder, RUNGS, '--rates=1,1e30')


@pytest.mark.exhaustive
def test_it_foretells_a_loss(climbed):
  folder, said = climbed
  found = json.loads((folder / 'ladder.json').read_text())
  assert [run['size'] for run in found['runs']] == [
    size for size in ('8x1', '16x1', '24x1', '32x2') for _ in range(2)
  ]
  predicted = found['predicted']
  assert predicted['size'] == '64x2'
  assert predicted['low'] < predicted['loss'] < predicted['high']
  assert f'64x2 is predicted to reach {predicted["loss"]:.4f}' in said
  assert 'Losses by the factor of LEARNING_RATE' in said
  diverged = [run['loss'] for run in found['runs'] if run['rate'] == 1e30]
  assert diverged == 4 * [None]
  assert found['rate'] == 1
  records = (folder / '32x2_seed1234' / 'eval_metrics.jsonl').read_text().splitlines()
  assert json.loads(records[-1])['avg_xent'] == found['runs'][-2]['loss']


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_command_that_it_prints_trains_the_model_that_was_asked_for(climbed, tmp_path):
  _, said = climbed
  command = said.strip().splitlines()[-1].split()
  assert command[:3] == ['paxlite', 'train', 'DemoGPT']
  words = [word for word in command[3:] if not word.startswith('MAX_STEPS')]
  assert 'RESIDUAL_FACTOR=0.5' in words
  runs.module('paxlite', 'train', 'DemoGPT', f'--folder={tmp_path / "run"}', *words, 'MAX_STEPS=1')


@pytest.mark.exhaustive
def test_what_is_there_is_not_trained_again(climbed):
  folder, said = climbed
  before = {path: path.stat().st_mtime_ns for path in folder.glob('*/*.jsonl')}
  again = ladder(folder, RUNGS, '--rates=1,1e30')
  assert {path: path.stat().st_mtime_ns for path in folder.glob('*/*.jsonl')} == before
  answer = said.split('\n\n', 1)[1]
  assert again.endswith(answer)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
  ('changed', 'said'),
  [
    ('WEIGHT_DECAY=0.5', 'WEIGHT_DECAY was 0.01 and is 0.5'),
    ('MAX_EVAL_BATCHES=1', 'MAX_EVAL_BATCHES was 2 and is 1'),
    ('MAX_STEPS=13', 'MAX_STEPS was 12 and is 13'),
    ('NUM_LAYERS=3', None),
  ],
)
def test_a_folder_with_other_runs_is_refused(changed, said, climbed):
  """What is asked for may change: the small models are those of any depth."""
  folder, _ = climbed
  found = ladder(folder, RUNGS, changed, code=2 if said else 0)
  if said:
    assert f'8x1_seed1234 holds a run of another ladder: {said}' in found


@pytest.mark.exhaustive
def test_a_folder_of_another_experiment_is_refused(climbed):
  folder, _ = climbed
  values = [*VALUES, 'OPTIMIZER=muon']
  command = ['ladder', 'DemoGPTAdam', f'--folder={folder}', RUNGS, *values]
  result = runs.module('paxlite', *command, code=2)
  assert 'experiment was paxlite.experiments.demo.DemoGPT and is' in result.stderr


@pytest.mark.exhaustive
def test_a_stopped_ladder_goes_on(tmp_path):
  folder = tmp_path / 'small'
  command = [sys.executable, '-m', 'paxlite', 'ladder', 'DemoGPT', f'--folder={folder}']
  values = [*VALUES, 'MAX_STEPS=60', 'CHECKPOINT_EVERY_N_STEPS=60', 'SUMMARY_INTERVAL_STEPS=1']
  environment = os.environ | {'JAX_PLATFORMS': 'cpu'}
  process = subprocess.Popen([*command, RUNGS, *values], cwd=runs.ROOT, env=environment)
  metrics = folder / '8x1_seed1234' / 'metrics.jsonl'
  until = time.monotonic() + 120
  while not (metrics.is_file() and metrics.read_text().count('\n') >= 3):
    assert process.poll() is None
    assert time.monotonic() < until
    time.sleep(0.02)
  process.send_signal(signal.SIGTERM)
  assert process.wait(60) == 128 + signal.SIGTERM
  steps = [json.loads(line)['step'] for line in metrics.read_text().splitlines()]
  (saved,) = (folder / '8x1_seed1234' / 'checkpoints').glob('checkpoint_*')
  assert steps[-1] <= int(saved.name.rpartition('_')[2]) < 60
  again = subprocess.run(
    [*command, RUNGS, *values], cwd=runs.ROOT, env=environment, capture_output=True, text=True
  )
  assert again.returncode == 0, again.stderr
  assert 'Continuing' in (folder / '8x1_seed1234.log').read_text()
  assert [json.loads(line)['step'] for line in metrics.read_text().splitlines()] == [*range(1, 61)]


@pytest.mark.cases(fast=0, slow=2)
@pytest.mark.parametrize(
  ('flags', 'said'),
  [
    (['--rungs=64'], "'64' must be WIDTHxLAYERS"),
    (['NORM_POLICY=post', RUNGS], 'state --rungs that are as deep as the model, such as 8x2'),
    (['--rungs=20x1,8x1,16x1,32x1'], '20x1: DemoGPT has 8 heads'),
    (['--rungs=8x1,16x1,32x1'], '3 sizes cannot determine a law'),
    (['--rates=0'], '--rates=0 must be numbers above 0'),
    (['--seeds=0'], '--seeds=0 must be at least 1'),
    (['OPTIMIZER=sgd', '--print'], 'OPTIMIZER=sgd: its learning rate at other widths is unknown'),
    (['EVAL_FRACTION=0', '--print'], 'DemoGPT has no held-out data'),
  ],
)
@pytest.mark.slow
def test_wrong_input_is_refused_before_anything_is_written(flags, said, tmp_path):
  folder = tmp_path / 'ladder'
  assert said in ladder(folder, *flags, code=2)
  assert not folder.exists()
