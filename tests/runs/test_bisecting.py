"""Two runs that should agree, and do not."""

import json
import re
import subprocess
import sys

import pytest

from paxlite.data import packaged
from tests.runs.test_verifying import FLIPPED, SHORT
from tests.support import runs
from tests.support.processes import on_processes, process_flags


def bisected(one, other, *flags: str, code: int = 0, devices: int = 1) -> str:
  command = ['bisect', str(one), str(other), '--import=tests.support.experiments', *flags]
  result = runs.module('paxlite', *command, code=code, devices=devices)
  return result.stdout + result.stderr


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  folder = tmp_path_factory.mktemp('bisect') / 'run'
  runs.run(folder, *SHORT)
  return folder


@pytest.mark.slow
def test_runs_that_agree(run, tmp_path):
  runs.run(tmp_path / 'again', *SHORT)
  found = bisected(run, tmp_path / 'again')
  assert 'nothing differs: values, versions and devices of the last starts, and data' in found
  assert 'Records: all 8 common steps are equal.' in found
  assert 'the states of step 8 are equal bit for bit' in found
  assert 'Nothing differs up to the last step that both have.' in found


@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.slow
@pytest.mark.parametrize(
  ('flag', 'lines'),
  [
    (
      'LEARNING_RATE=0.0007',
      [
        'LEARNING_RATE: 0.0006 in A, 0.0007 in B',
        'Records: equal up to step 1, they differ from step 2: lr 0.0003',
        'Replaying both from the beginning:',
        'step 2: the state before it and its batch are equal',
        'are equal, so the optimizer causes the difference',
      ],
    ),
    (
      'ACTIVATION_CLS=gelu_exact',
      [
        'Records: they differ from step 1: ',
        'gradients: ',
        'arrays differ',
        'layers: the first with another output is transformer/x_layers_0/ff_layer/',
      ],
    ),
    (
      'Z_LOSS_WEIGHT=0.01',
      ['layers: the outputs of all ', 'the loss or the backward pass causes the difference'],
    ),
    ('NUM_MICROBATCHES=2', ['NUM_MICROBATCHES is 1 in A and 2 in B, so sums over microbatches']),
    ('SEED=4', ['The runs differ before the first step:', 'params/embedding/emb_var: ']),
    ('MODEL_DIMS=64', ['Checkpoints: arrays have other shapes: opt_state/1/m/embedding/emb_var']),
    ('NUM_LAYERS=2', ['Checkpoints: the states have other arrays: ']),
  ],
)
def test_what_parts_two_runs_is_named(flag, lines, run, tmp_path):
  runs.run(tmp_path / 'other', *SHORT, f'--fdl.{flag}')
  found = bisected(run, tmp_path / 'other')
  for line in lines:
    assert line in found


@pytest.mark.slow
def test_a_run_whose_memory_lost_a_bit(run, tmp_path):
  runs.run(tmp_path / 'RUN', *SHORT, module=FLIPPED, env=dict(FLIPS='params:0:6'))
  found = bisected(run, tmp_path / '0')
  assert 'nothing differs: values, versions and devices of the last starts, and data' in found
  assert 'the states of step 4 are equal bit for bit' in found
  assert 'Replaying both from step 4:' in found
  # which record is the first to show the bit depends on how a processor rounds
  assert re.search('both give the same bits up to step [678], on this machine', found), found


@pytest.mark.exhaustive
def test_the_first_layer_that_differs_on_four_devices(tmp_path):
  flags = [*SHORT, '--fdl.ICI_MESH_SHAPE=[1,2,2]', '--fdl.NUM_LAYERS=2', '--fdl.MAX_STEPS=2']
  runs.run(tmp_path / 'one', *flags, devices=4)
  other = ['--fdl.ACTIVATION_CLS=gelu_exact', '--fdl.NUM_MICROBATCHES=2']
  runs.run(tmp_path / 'other', *flags, *other, devices=4)
  found = bisected(tmp_path / 'one', tmp_path / 'other', devices=4)
  assert 'layers: the first with another output is transformer/x_layers_0/ff_layer/' in found


@pytest.mark.slow
def test_runs_without_a_step_in_common(run, tmp_path):
  runs.run(tmp_path / 'run', *SHORT, '--fdl.MAX_STEPS=3', '--fdl.LEARNING_RATE=1.0')
  (tmp_path / 'run' / 'metrics.jsonl').unlink()
  found = bisected(run, tmp_path / 'run')
  assert 'no recorded step in common' in found
  assert 'Checkpoints: the runs have none of the same step' in found
  assert 'Nothing differs' not in found


@pytest.mark.exhaustive
@pytest.mark.slow
def test_on_two_processes(tmp_path):
  for name, rate in (('one', '6e-4'), ('two', '7e-4')):
    flags = ['--fdl.MAX_STEPS=4', '--fdl.NUM_LAYERS=1', f'--fdl.LEARNING_RATE={rate}']
    on_processes(tmp_path / name, 2, *flags, config='TinyGPT')
  folders = [str(tmp_path / name) for name in ('one', 'two')]
  started = [
    runs.started(
      [sys.executable, '-m', 'paxlite', 'bisect', *folders, *flags], runs.environment(2),
      stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )
    for flags in process_flags(2)
  ]  # fmt: skip
  ended = [process.communicate(timeout=300) for process in started]
  assert [process.returncode for process in started] == [0, 0], ended
  alone = runs.module('paxlite', 'bisect', *folders, devices=4).stdout
  assert 'step 2: the state before it and its batch are equal' in alone
  first, second = ([line for line in out.splitlines() if 'Gloo' not in line] for out, _ in ended)
  assert first == alone.splitlines()
  assert not second


@pytest.mark.exhaustive
@pytest.mark.slow
def test_other_data(tmp_path):
  texts = [{'text': f'{i} ' * (3 + i % 40)} for i in range(400)]
  flags = [*SHORT, f'--fdl.VOCAB_PATH={packaged.VOCAB}']
  for name in 'ab':
    if name == 'b':
      for i in range(0, 400, 7):
        texts[i]['text'] = f'another text {i}'
    file = tmp_path / f'{name}.jsonl'
    file.write_text('\n'.join(map(json.dumps, texts)) + '\n')
    config = 'tests.support.experiments.TinyDocuments'
    runs.run(tmp_path / f'run_{name}', *flags, f'--fdl.TRAIN_SOURCES={file}', config=config)
  found = bisected(tmp_path / 'run_a', tmp_path / 'run_b')
  assert 'the records of the training data differ' in found
  assert ': the batches differ: ids in ' in found


@pytest.mark.parametrize('place', ['', 'gone'])
def test_a_folder_without_a_run(place, tmp_path):
  (tmp_path / 'empty').mkdir()
  folder = tmp_path / (place or 'empty')
  assert 'holds no run (experiment.json is missing)' in bisected(folder, folder, code=2)
