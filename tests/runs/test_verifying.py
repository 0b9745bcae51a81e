"""Steps that are done again, with a bit that was lost and without."""

import json
import re
import types

import pytest

from paxlite.core.errors import UserError
from paxlite.data import packaged
from paxlite.experiments.demo import TinyGPT
from paxlite.experiments.parts.experts import MixtureOfExperts
from paxlite.proof.replay import Replay
from tests.support import runs
from tests.support.processes import start_processes

SHORT = [
  '--fdl.MAX_STEPS=8', '--fdl.CHECKPOINT_EVERY_N_STEPS=4', '--fdl.SUMMARY_INTERVAL_STEPS=1',
  '--fdl.NUM_LAYERS=1', '--fdl.PERCORE_BATCH_SIZE=4',
]  # fmt: skip
# the load-balancing loss is no sum over rows
EXPERTS = ['--fdl.NUM_EXPERTS=4', '--fdl.BLOCKS_PER_LAYER=1', '--fdl.NUM_MOE_GROUPS=2']
MIXED = ['--fdl.SOURCES=[PATH1.jsonl,PATH2.jsonl]', '--fdl.WEIGHTS=[0.7,0.3]']
FLIPPED = 'tests.support.flipped_main'


class TinyExperts(MixtureOfExperts, TinyGPT):
  pass


def verified(folder, *flags: str, devices: int = 1, code: int = 0) -> str:
  """Runs `paxlite verify`; returns what it printed, and the error."""
  command = ['verify', str(folder), '--import=tests.support.experiments', *flags]
  result = runs.module('paxlite', *command, devices=devices, code=code)
  return result.stdout + result.stderr


def test_a_run_is_replayed_bit_for_bit(tmp_path):
  runs.run(tmp_path / 'run', *SHORT)
  files = {p: p.read_bytes() for p in (tmp_path / 'run').rglob('*') if p.is_file()}
  found = verified(tmp_path / 'run')
  assert 'Replaying 4 steps from the checkpoint of step 4 to the checkpoint of step 8.' in found
  assert 'Loss and gradients of 4 recorded steps: equal bit for bit.' in found
  assert 'State of step 8: ' in found
  assert 'numbers, equal bit for bit.' in found
  assert files == {p: p.read_bytes() for p in (tmp_path / 'run').rglob('*') if p.is_file()}
  found = verified(tmp_path / 'run', '--from_step=0', '--to_step=4')
  assert 'Replaying 4 steps from the beginning to the checkpoint of step 4.' in found
  assert 'equal bit for bit' in found


@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.slow
@pytest.mark.parametrize('config', ['TinyDocuments', 'TinyMixture'])
def test_data_with_a_position_are_replayed(config, tmp_path):
  texts = [json.dumps({'text': f'{i} ' * (3 + i % 40)}) for i in range(400)]
  for name in ('texts1.jsonl', 'texts2.jsonl'):
    (tmp_path / name).write_text('\n'.join(texts) + '\n')
  sources = {'TinyDocuments': ['--fdl.TRAIN_SOURCES=PATH1.jsonl'], 'TinyMixture': MIXED}[config]
  flags = [*SHORT, f'--fdl.VOCAB_PATH={packaged.VOCAB}']
  flags += [flag.replace('PATH', f'{tmp_path}/texts') for flag in sources]
  runs.run(tmp_path / 'run', *flags, config=f'tests.support.experiments.{config}')
  assert 'equal bit for bit' in verified(tmp_path / 'run')


@pytest.mark.exhaustive
@pytest.mark.slow
def test_another_mesh_and_a_run_that_was_killed_in_between(tmp_path):
  flags = [*SHORT, '--fdl.ICI_MESH_SHAPE=[1,2,1]', '--fdl.PERCORE_BATCH_SIZE=2']
  runs.run(tmp_path / 'run', *flags, '--fdl.MAX_STEPS=6', devices=2)
  runs.run(tmp_path / 'run', *flags, devices=2)
  assert 'of 8 recorded steps: equal bit for bit' in verified(
    tmp_path / 'run', '--from_step=0', devices=2
  )
  found = verified(tmp_path / 'run', 'ICI_MESH_SHAPE=[1,1,1]', 'PERCORE_BATCH_SIZE=4')
  assert 'Other bits are expected: ICI_MESH_SHAPE was [1, 2, 1] and is [1, 1, 1].' in found
  assert 'Losses agree within ' in found
  path = tmp_path / 'run/metrics.jsonl'
  lines = [json.loads(line) for line in path.read_text().splitlines()]
  lines[-1]['loss'] += 0.1
  path.write_text('\n'.join(map(json.dumps, lines)) + '\n')
  found = verified(tmp_path / 'run', 'ICI_MESH_SHAPE=[1,1,1]', 'PERCORE_BATCH_SIZE=4', code=1)
  assert 'the losses of the replay differ by' in found
  path.unlink()
  found = verified(tmp_path / 'run', 'ICI_MESH_SHAPE=[1,1,1]', 'PERCORE_BATCH_SIZE=4', code=2)
  assert 'no recorded loss can be compared' in found


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_run_that_went_on_elsewhere_or_with_other_values(tmp_path):
  two = ['--fdl.ICI_MESH_SHAPE=[1,2,1]', '--fdl.PERCORE_BATCH_SIZE=2']
  runs.run(tmp_path / 'run', *SHORT, *two, '--fdl.MAX_STEPS=4', devices=2)
  runs.run(tmp_path / 'run', *SHORT)
  found = verified(tmp_path / 'run', '--from_step=0', '--to_step=4')
  assert 'ICI_MESH_SHAPE was [1, 2, 1] and is [1, 1, 1].' in found
  assert 'the devices were 2 × cpu and are 1 × cpu.' in found
  assert 'equal bit for bit' in verified(tmp_path / 'run')
  runs.run(
    tmp_path / 'run', *SHORT, '--fdl.MAX_STEPS=12', '--fdl.LEARNING_RATE=0.01', '--accept_changes'
  )
  found = verified(tmp_path / 'run', '--from_step=4', '--to_step=12', code=2)
  assert 'after step 4, LEARNING_RATE was 0.0006 and is 0.01. The steps from 8 on can be' in found
  assert 'equal bit for bit' in verified(tmp_path / 'run')


@pytest.mark.slow
def test_a_flipped_bit_in_the_memory_of_a_run_is_found_by_a_replay(tmp_path):
  flips = dict(FLIPS='params:0:6,opt_state:0:6,batch:0:6')
  runs.run(tmp_path / 'RUN', *SHORT, module=FLIPPED, env=flips, config='TinyGPT')
  for name in '012':
    found = verified(tmp_path / name, code=1)
    assert name != '2' or 'recorded steps differ, the first ones:\n  step 6: loss' in found
    assert 'numbers differ, by up to' in found
    assert 'stopped: the replay differs from the run' in found
    assert 'equal bit for bit' in verified(tmp_path / name, '--from_step=0', '--to_step=4')


CASES = {
  2: {
    'params:1:4': 'copies differ: params/embedding/emb_var on device 0 and device 1: one of its',
    'opt_state:0:4': 'opt_state/1/m/embedding/emb_var on device 0 and device 1: one of its copies',
    'batch:1:4': 'the batch of step 4 differs from the data, on device 1.',
    'product:1:4': 'step 4 gave other bits when it was repeated on the same devices',
    'products:1:3': 'device 0 and device 1: one of them computes wrong',
  },
  8: {
    'params:3:4': 'params/embedding/emb_var on device 3: it is wrong',
    'opt_state:5:4': 'opt_state/1/m/embedding/emb_var on device 5: it is wrong',
    'batch:6:4': 'the batch of step 4 differs from the data, on device 6.',
    'products:2:3': 'the same rows gave other bits on other devices: device 2: there the',
  },
}


@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.slow
@pytest.mark.parametrize('devices', CASES)
def test_the_device_with_other_bits_is_named(devices, tmp_path):
  cases = CASES[devices]
  flags = [f'--fdl.ICI_MESH_SHAPE=[{devices},1,1]', '--fdl.PERCORE_BATCH_SIZE=1']
  result = runs.run(
    tmp_path / 'RUN', *SHORT, *flags, '--fdl.VERIFY_EVERY_N_STEPS=2', module=FLIPPED,
    env=dict(FLIPS=','.join(['none:0:0', *cases])), devices=devices, code=1,
  )  # fmt: skip
  assert 'none:0:0 ended with 0' in result.stdout
  assert 'depends on the devices of' not in result.stderr
  stopped = [line for line in result.stderr.splitlines() if line.startswith('stopped:')]
  for (flip, message), line in zip(cases.items(), stopped, strict=True):
    assert message in line
    # in step 2, it was not the turn of device 2 of 8
    sure = 'No step before' if (flip, devices) == ('products:2:3', 8) else 'Step 2'
    assert f'{sure} was verified, and checkpoints since then may be wrong' in line
    assert f'{flip} ended with 1' in result.stdout


@pytest.mark.slow
@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.parametrize(
  ('flip', 'message'),
  [
    ('opt_state:3:4', r'on device \d+ of process 1: it is wrong'),
    ('batch:1:4', 'differs from the data, on device 1 of process 0'),
    ('products:2:3', r'on other devices: device \d+ of process 1: there the results are wrong'),
  ],
)
def test_processes_agree_on_the_device(flip, message, tmp_path):
  flags = ['--fdl.ICI_MESH_SHAPE=[4,1,1]', '--fdl.VERIFY_EVERY_N_STEPS=2', '--fdl.MAX_STEPS=6']
  started = start_processes(
    tmp_path / 'run', 2, *flags, config='TinyGPT', module=FLIPPED, env=dict(FLIPS=flip)
  )
  for process in started:
    stdout, stderr = process.communicate(timeout=300)
    assert f'{flip} ended with 1' in stdout
    assert re.search(message, stderr)


MESHES = {
  'experts': ['--fdl.ICI_MESH_SHAPE=[1,2,1]', *EXPERTS],
  'all axes': ['--fdl.ICI_MESH_SHAPE=[2,2,2]', '--fdl.NUM_MICROBATCHES=2'],
  'dropout': ['--fdl.ICI_MESH_SHAPE=[2,2,2]', '--fdl.DROPOUT_PROB=0.1'],
  'narrow moments': ['--fdl.ICI_MESH_SHAPE=[4,2,1]', '--fdl.ADAM_MOMENTS_DTYPE=int8'],
}


@pytest.mark.slow
@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.parametrize('name', MESHES)
def test_verified_steps_change_nothing_and_give_no_false_alarm(name, tmp_path):
  flags = [*SHORT, *MESHES[name], '--fdl.PERCORE_BATCH_SIZE=2']
  how = dict(
    devices=2 if name == 'experts' else 8,
    config='tests.runs.test_verifying.TinyExperts' if name == 'experts' else 'TinyGPT',
  )
  result = runs.run(tmp_path / 'verified', *flags, '--fdl.VERIFY_EVERY_N_STEPS=1', **how)
  assert 'depends on the devices of' not in result.stderr
  runs.run(tmp_path / 'plain', *flags, **how)
  keys = 'step', 'loss', 'grad_norm'
  of = lambda name: [[r[k] for k in keys] for r in runs.records(tmp_path / name)]
  assert of('verified') == of('plain')


@pytest.mark.parametrize(
  ('flags', 'message'),
  [
    (['--from_step=3'], 'has no checkpoint of step 3; it has 4, 8'),
    (['--from_step=8'], '--from_step=8 must be at least 0 and below --to_step=8'),
    (['--to_step=0'], '--to_step=0 must be at least 1'),
    (['--to_step=-1'], '--to_step=-1 must be at least 1'),
    (['LEARNING_RATE=1.0'], 'LEARNING_RATE 0.0006 → 1.0'),
    (
      ['LEARNING_RATE=1.0', '--accept_changes'],
      'LEARNING_RATE was 0.0006 and is 1.0. State the values of the run',
    ),
    (['--before'], '--before is for --mode=eval'),
  ],
)
def test_wrong_input_has_one_line(flags, message, short_run):
  assert message in verified(short_run, *flags, code=2)


@pytest.mark.slow
def test_a_run_that_continued_the_state_of_another_one(short_run, tmp_path):
  state = [f'--fdl.CHECKPOINT_RESTORE_PATH={short_run}', '--fdl.CHECKPOINT_RESTORE_STATE=True']
  runs.run(tmp_path / 'run', *SHORT, *state, '--fdl.MAX_STEPS=12')
  found = verified(tmp_path / 'run', code=2)
  assert 'Replaying' not in found
  assert 'continued the state of another run from step 8, so it has no start' in found
  assert 'between two of its checkpoints (12)' in found


def test_a_damaged_checkpoint_is_named(short_run):
  (chunk, *_) = sorted((short_run / 'checkpoints/checkpoint_00000004/state').rglob('0*'))
  before = chunk.read_bytes()
  chunk.write_bytes(bytes([before[0] ^ 1]) + before[1:])
  assert 'checkpoint_00000004 is damaged: ' in verified(short_run, code=2)
  chunk.write_bytes(before)


@pytest.fixture(scope='module')
def short_run(tmp_path_factory):
  folder = tmp_path_factory.mktemp('short') / 'run'
  runs.run(folder, *SHORT)
  return folder


def test_a_folder_without_a_checkpoint(tmp_path):
  assert 'EXPERIMENT is missing' in verified(tmp_path, code=2)


def test_other_data_are_named_before_a_device_is():
  """Also where a replay begins at the first step, whose state has no metadata."""
  before = {'fingerprint': 1, 'tokens': 2}
  replay = types.SimpleNamespace(
    trainer=types.SimpleNamespace(
      data=types.SimpleNamespace(
        identity={'fingerprint': 3, 'tokens': 2}, input=types.SimpleNamespace(name='a.jsonl')
      ),
      store=types.SimpleNamespace(metadata={4: before, 0: {}}.get),
    ),
    run=types.SimpleNamespace(place='run'),
  )
  with pytest.raises(UserError, match=r'a\.jsonl is not the data of run up to step 4'):
    Replay.check_same_course(replay, 0, 4)
