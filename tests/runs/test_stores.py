"""Runs whose job_log_dir is in a bucket, of SeaweedFS (S3) or tests/support/gcs_server.py (GCS)."""

import json
import pathlib
import signal
import subprocess
import time

import pytest

from paxlite.data import packaged
from paxlite.stores.object_store import ObjectStore
from tests.support import processes, runs
from tests.support.gcs_server import gcs_server
from tests.support.proxy import proxy
from tests.support.s3_server import s3_server

MODULE = 'tests.support.stored_main'
FLAGS = (
  '--fdl.MAX_STEPS=12', '--fdl.CHECKPOINT_EVERY_N_STEPS=3', '--fdl.NUM_LAYERS=1',
  '--fdl.SUMMARY_INTERVAL_STEPS=1', '--fdl.DROPOUT_PROB=0.1',
)  # fmt: skip

SMALL = (
  '--fdl.MODEL_DIMS=64', '--fdl.MAX_SEQ_LEN=32', '--fdl.PERCORE_BATCH_SIZE=2',
  '--fdl.MAX_EVAL_BATCHES=1',
)  # fmt: skip


@pytest.fixture(scope='module')
def s3(tmp_path_factory):
  with s3_server(tmp_path_factory.mktemp('s3')) as server:
    server.create_bucket('bkt')
    yield server


@pytest.fixture(scope='module')
def expected(tmp_path_factory):
  """The losses of an undisturbed run in a folder."""
  folder = tmp_path_factory.mktemp('undisturbed')
  runs.run(folder, *FLAGS)
  return runs.losses(folder)


def run(place, local_dir, environment, *flags, **kwargs):
  flags = (*FLAGS, f'--local_dir={local_dir}', *flags)
  return runs.run(place, *flags, module=MODULE, env=environment, **kwargs)


def start(place, local_dir, environment, *flags):
  command = runs.command(place, *FLAGS, f'--local_dir={local_dir}', *flags, module=MODULE)
  return runs.started(
    command, runs.environment() | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
  )


def store_of(place, environment):
  return ObjectStore(place, environment=environment)


def stored_losses(place, environment):
  lines = store_of(place, environment).read('metrics.jsonl').splitlines()
  return {r['step']: r['loss'] for r in map(json.loads, lines)}


def manifests(place, environment):
  names = [o.name for o in store_of(place, environment).below()]
  steps = [name.split('/')[-2][-8:] for name in names if name.endswith('checksums.json')]
  return sorted(map(int, steps))


@pytest.mark.slow
def test_a_run_continues_on_another_machine(tmp_path):
  """With the tokenizer that the run has kept."""
  with gcs_server('bkt') as gcs:
    place, environment = 'gs://bkt/runs/one', gcs.environment()
    go = lambda machine, *flags: run(
      place, tmp_path / machine, environment, *SMALL, '--fdl.LR_WARMUP=0', *flags, config='DemoGPT'
    )
    out = go('a', '--fdl.MAX_STEPS=5').stdout
    assert 'checkpoints are in gs://bkt/runs/one' in out
    assert manifests(place, environment) == [3, 5]
    go('b', '--fdl.MAX_STEPS=7')
    assert stored_losses(place, environment).keys() == set(range(1, 8))
    copies = [
      store_of(place, environment).read('tokenizer/text8k.model'),
      *(path.read_bytes() for path in tmp_path.glob('b/*/tokenizer/text8k.model')),
    ]
    assert copies == [pathlib.Path(packaged.VOCAB).read_bytes()] * 2
    # the first machine's folder is older than the bucket now
    assert 'Continuing from the checkpoint of step 7' in go('a').stdout
    assert list(stored_losses(place, environment)) == list(range(1, 13))
    assert not pathlib.Path('gs:').exists()


@pytest.mark.slow
def test_what_is_wrong_is_said_before_anything_is_compiled(tmp_path):
  with gcs_server('bkt') as gcs:
    environment = gcs.environment()
    result = run('gs://none/x', tmp_path, environment, code=2)
    assert result.stderr.startswith('error: gs://none: bucket none does not exist: create it')
    result = run('gs://bkt/x', tmp_path, environment | {'GOOGLE_BEARER_TOKEN': 'no'}, code=2)
    assert result.stderr.startswith('error: gs://bkt: the store refuses these credentials')
    assert not gcs.objects['bkt']
    nothing = {'AWS_ENDPOINT_URL': gcs.endpoint, 'HOME': str(tmp_path)}
    result = run('s3://bkt/x', tmp_path, nothing, code=2)
    assert result.stderr.startswith('error: s3://bkt: no credentials for s3:// were found: set AWS')
    assert result.stderr.count('\n') == 1
    assert 'Compiled' not in result.stdout


@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.slow
@pytest.mark.parametrize(
  ('machine', 'moment'), [('same', 'upload:9'), ('other', 'manifest:2'), ('other', 'copied:2')]
)
def test_a_killed_run_continues_bit_by_bit(tmp_path, s3, expected, moment, machine):
  place, environment = f's3://bkt/killed/{moment[:3]}/{machine}', s3.environment()
  run(place, tmp_path / 'a', environment | {'KILL_AT': moment}, code=-signal.SIGKILL)
  assert manifests(place, environment) == {'u': [], 'm': [3], 'c': [3, 6]}[moment[0]]
  local_dir = tmp_path / ('a' if machine == 'same' else 'b')
  out = run(place, local_dir, environment).stdout
  steps = {'u': [3, 6, 9, 12], 'm': [3, 6, 9, 12], 'c': [6, 9, 12]}[moment[0]]
  if machine == 'other' and moment[0] != 'u':
    step = {'m': 3, 'c': 6}[moment[0]]
    assert f'Continuing from the checkpoint of step {step}.' in out
  assert manifests(place, environment)[-len(steps) :] == steps
  assert stored_losses(place, environment) == expected


@pytest.mark.slow
def test_a_second_run_is_refused(tmp_path, s3):
  place, environment = 's3://bkt/second', s3.environment()
  first = start(place, tmp_path / 'a', environment, '--fdl.MAX_STEPS=100000')
  try:
    (local,) = wait_for_folder(tmp_path / 'a', 'metrics.jsonl')
    for local_dir in (tmp_path / 'b', tmp_path / 'a'):
      result = run(place, local_dir, environment, code=2)
      message = f'error: --job_log_dir={place} is in use by another run (process {first.pid} on '
      assert message in result.stderr
    first.send_signal(signal.SIGTERM)
    assert first.wait(60) == 75
  finally:
    first.kill()
  at = runs.records(local.parent)[-1]['step']
  assert manifests(place, environment)[-1] == at


@pytest.mark.slow
def test_a_run_that_lost_its_lease_leaves(tmp_path, s3):
  place, environment = 's3://bkt/lost', s3.environment()
  first = start(place, tmp_path / 'a', environment, '--fdl.MAX_STEPS=100000')
  wait_for_folder(tmp_path / 'a', 'metrics.jsonl')
  first.send_signal(signal.SIGSTOP)  # as a machine that is suspended
  try:
    run(place, tmp_path / 'b', environment, '--fdl.MAX_STEPS=4')
    after = manifests(place, environment)
    first.send_signal(signal.SIGCONT)
    out, _ = first.communicate(timeout=60)
  finally:
    first.kill()
  assert first.returncode == 1
  assert f'stopped: {place} was taken over by another run' in out
  assert manifests(place, environment) == after


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_run_that_wakes_in_the_middle_of_a_copy_writes_no_object(tmp_path, s3):
  place, own = 's3://bkt/woken', s3.environment()
  with proxy(s3.endpoint, delay=0.1) as between:
    environment = s3.environment(between.endpoint)
    first = start(place, tmp_path / 'a', environment, '--fdl.MAX_STEPS=100000')
    try:
      (local,) = wait_for_folder(tmp_path / 'a', 'metrics.jsonl')
      for i in range(300):
        (local.parent / f'{i:03d}.txt').write_text(f'{i}')
      below = lambda: {o.name: o.tag for o in store_of(place, own).below()}
      until = time.monotonic() + 60
      while len([key for key in below() if key.endswith('.txt')]) < 20:
        assert time.monotonic() < until
        time.sleep(0.05)
      first.send_signal(signal.SIGSTOP)
      run(place, tmp_path / 'b', own, '--fdl.MAX_STEPS=4')
      after = below()
      assert len([key for key in after if key.endswith('.txt')]) < 250
      first.send_signal(signal.SIGCONT)
      out, _ = first.communicate(timeout=60)
    finally:
      first.kill()
  assert first.returncode == 1
  assert 'was taken over by another run' in out
  assert below() == after


MARKERS = (
  'runs/', 'runs/one/', 'runs/one/checkpoints/', 'runs/one/checkpoints/checkpoint_00000003/',
  'runs/one/checkpoints/checkpoint_00000003/state/', 'runs/one/best/', 'runs/one/best/checkpoints/',
  'runs/one/goodput/', 'runs/one/summaries/', 'runs/one/old_$folder$', 'data/', 'data/more/',
  'data/more.txt/', 'data/more_$folder$', 'tokens/', 'tokens/train/', 'exported/',
  'imported/', 'imported/state/', 'plans/',
)  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.slow
@pytest.mark.parametrize('scheme', ['s3', 'gs'])
def test_every_command_below_markers_of_folders(tmp_path, s3, monkeypatch, scheme):
  """Consoles make them: objects without content whose names end in a slash."""
  with gcs_server('bkt') as gcs:
    server = s3 if scheme == 's3' else gcs
    environment = server.environment() | {'XDG_CACHE_HOME': str(tmp_path / 'cache')}
    for name, value in environment.items():
      monkeypatch.setenv(name, value)
    bucket = f'{scheme}://bkt/marked'
    for marker in MARKERS:
      server.put(f'/bkt/marked/{marker}')
    store = ObjectStore(bucket)
    store.write('data/more/a.txt', b'In the beginning. ' * 3000)
    one = f'{bucket}/runs/one'
    train = lambda folder, steps, *flags: (
      run(
        one, folder, environment, *SMALL, f'--fdl.MAX_STEPS={steps}', *flags, config='DemoGPT'
      ).stdout
    )
    train(tmp_path / 'a', 3)
    assert 'Continuing from the checkpoint of step 3' in train(tmp_path / 'b', 6)
    for marker in MARKERS:
      server.put(f'/bkt/marked/{marker}')
    paxlite = lambda *arguments: runs.module('paxlite', *map(str, arguments)).stdout
    assert 'one' in paxlite('report', one, '--markdown=-', f'--output={tmp_path}/r.html')
    assert 'productive steps' in paxlite('goodput', one)
    assert paxlite('generate', f'--checkpoint={one}', '--prompt=In', '--max_new_tokens=3')
    train(tmp_path / 'b', 6, '--mode=eval')
    started = (f'--fdl.CHECKPOINT_RESTORE_PATH={one}', '--fdl.MAX_STEPS=1', '--fdl.NUM_LAYERS=1')
    runs.run(tmp_path / 'restored', *SMALL, *started, config='DemoGPT', env=environment)
    data = f'{bucket}/data/*'
    vocab = 'paxlite/data/packaged/text8k.model'
    paxlite('tokenize', f'--vocab={vocab}', f'--output={bucket}/tokens', data)
    paxlite('tokenize', f'--vocab={vocab}', f'--output={tmp_path}/tokens', f'{bucket}/data/more/*')
    assert {p.name for p in (tmp_path / 'tokens/train').iterdir()} == {
      key.rpartition('/')[2] for key in (o.name for o in store.below('tokens/train'))
    }


@pytest.mark.exhaustive
def test_runs_in_a_store_are_verified_and_compared(tmp_path, s3, monkeypatch):
  """On another machine, which the runs know nothing of; any of the checkpoints can be taken."""
  for name, rate in (('one', '6e-4'), ('two', '7e-4')):
    place = f's3://bkt/verified/{name}'
    run(place, tmp_path / 'a', s3.environment(), f'--fdl.LEARNING_RATE={rate}')
  for name, value in {**s3.environment(), 'XDG_CACHE_HOME': str(tmp_path / 'cache')}.items():
    monkeypatch.setenv(name, value)
  store = ObjectStore('s3://bkt')
  held = lambda: {o.name: o.tag for o in store.below('verified')}
  before, one, two = held(), 's3://bkt/verified/one', 's3://bkt/verified/two'
  paxlite = lambda *arguments, code=0: runs.module('paxlite', *arguments, code=code)
  found = paxlite('verify', one).stdout
  assert 'Replaying 3 steps from the checkpoint of step 9 to the checkpoint of step 12.' in found
  assert 'Loss and gradients of 3 recorded steps: equal bit for bit.' in found
  found = paxlite('verify', one, '--from_step=0', '--to_step=3').stdout
  assert 'State of step 3: ' in found
  assert 'numbers, equal bit for bit.' in found
  found = paxlite('bisect', one, two).stdout
  assert 'Checkpoints: the states of step 3 differ in ' in found
  assert 'step 2: the state before it and its batch are equal' in found
  assert 'are equal, so the optimizer causes the difference' in found
  found = paxlite('data', one, two).stdout
  assert 'were trained on the same batches in all 12 steps' in found
  assert 'Row 0' in paxlite('data', one, '--step=7').stdout
  assert held() == before
  store.delete([key for key in before if '/one/checkpoints/checkpoint_00000009/' in key])
  found = paxlite('verify', one).stdout  # although there is a copy of it here
  assert 'Replaying 6 steps from the checkpoint of step 6 to the checkpoint of step 12.' in found
  assert 'has no checkpoint of step 9' in paxlite('verify', one, '--from_step=9', code=2).stderr
  store.delete([key for key in before if '/two/checkpoints/' in key])
  found = paxlite('bisect', one, two, code=2)
  assert 'LEARNING_RATE: 0.0006 in A, 0.0007 in B' in found.stdout
  assert 'holds no weights' in found.stderr


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize('mode', ['silent', '503'])
def test_a_store_that_is_slow_or_absent_stops_no_step(tmp_path, s3, expected, mode):
  with proxy(s3.endpoint, delay=0.05) as between:
    place, environment = f's3://bkt/absent/{mode}', s3.environment(between.endpoint)
    first = start(place, tmp_path / 'a', environment)
    wait_for_folder(tmp_path / 'a', 'experiment.json')
    between.mode = mode
    (metrics,) = wait_for_folder(tmp_path / 'a', 'metrics.jsonl')
    until = time.monotonic() + 60
    while len(metrics.read_text().splitlines()) < 12:
      assert time.monotonic() < until
      time.sleep(0.05)
    assert manifests(place, s3.environment()) == []
    time.sleep(3)
    between.mode = 'forward'
    out, _ = first.communicate(timeout=60)
  assert first.returncode == 0, out
  assert manifests(place, s3.environment()) == [3, 6, 9, 12]
  assert stored_losses(place, s3.environment()) == expected


@pytest.mark.exhaustive
def test_a_store_that_stays_away(tmp_path, s3, expected):
  with proxy(s3.endpoint) as between:
    place, environment = 's3://bkt/away', s3.environment(between.endpoint)
    first = start(place, tmp_path / 'a', environment | {'FINAL_SECONDS': '1'})
    wait_for_folder(tmp_path / 'a', 'experiment.json')
    between.mode = 'reset'
    out, _ = first.communicate(timeout=60)
  assert first.returncode == 1
  assert f'stopped: {place} lacks the checkpoint of step 12' in out
  assert 'cannot be written, training continues' in out
  out = run(place, tmp_path / 'a', s3.environment()).stdout
  assert 'Training is complete' in out
  assert manifests(place, s3.environment())[-1] == 12
  assert stored_losses(place, s3.environment()) == expected


@pytest.mark.exhaustive
def test_two_processes(tmp_path, s3):
  """First each has a disk of its own, with its part of a checkpoint; then they share one."""
  place, environment = 's3://bkt/two', s3.environment()
  flags = '--fdl.ICI_MESH_SHAPE=[1,2,2]', '--fdl.NUM_LAYERS=1'
  on_two(place, tmp_path, 2, environment, *flags, '--fdl.MAX_STEPS=6')
  assert manifests(place, environment) == [3, 6]
  parts = [len(list(tmp_path.glob(f'disk{i}/*/checkpoints/*6/state/*/[0-9]*'))) for i in (0, 1)]
  assert min(parts) > 5
  on_two(place, tmp_path, 2, environment, *flags, '--fdl.MAX_STEPS=8')
  on_two(place, tmp_path / 'others', 1, environment, *flags, '--fdl.MAX_STEPS=10')
  processes.on_processes(tmp_path / 'folder', 2, *flags, '--fdl.MAX_STEPS=10', config='TinyGPT')
  assert stored_losses(place, environment) == runs.losses(tmp_path / 'folder')


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_process_whose_folders_come_late_is_not_waited_for_forever(tmp_path, s3):
  environment = s3.environment() | {'LATE_FOLDERS': '1'}
  flags = '--fdl.ICI_MESH_SHAPE=[1,2,2]', '--fdl.NUM_LAYERS=1', '--fdl.MAX_STEPS=3'
  on_two('s3://bkt/late', tmp_path, 2, environment, *flags, seconds=90)
  assert manifests('s3://bkt/late', environment) == [3]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_two_processes_on_another_machine_wait_for_the_lease_of_a_killed_run(tmp_path, s3):
  """They wait for longer than gloo's 30 s, in which processes must connect to each other."""
  place, environment = 's3://bkt/killed', s3.environment()
  flags = '--fdl.ICI_MESH_SHAPE=[1,2,2]', '--fdl.NUM_LAYERS=1'
  local = f'--local_dir={tmp_path}/one'
  started = processes.start_processes(
    place, 2, *flags, '--fdl.MAX_STEPS=100000', config='TinyGPT', module=MODULE, env=environment,
    each=[local] * 2,
  )  # fmt: skip
  wait_for_folder(tmp_path / 'one', 'checkpoints/checkpoint_00000003')
  time.sleep(2)
  for process in started:
    process.kill()
    process.communicate()
  environment |= {'LEASE_EXPIRES': '40'}
  on_two(place, tmp_path / 'others', 1, environment, *flags, '--fdl.MAX_STEPS=100')


def on_two(place, folder, disks, environment, *flags, seconds=300):
  local = [f'--local_dir={folder}/disk{i % disks}' for i in range(2)]
  started = processes.start_processes(
    place, 2, *flags, config='TinyGPT', module=MODULE, env=environment, each=local
  )
  try:
    ended = [p.communicate(timeout=seconds) for p in started]
  finally:
    for process in started:
      process.kill()  # one that hangs would take the processor from other tests
  for process, (_, stderr) in zip(started, ended, strict=True):
    assert process.returncode == 0, stderr


def wait_for_folder(parent: pathlib.Path, name: str, seconds: float = 60) -> list[pathlib.Path]:
  until = time.monotonic() + seconds
  while not (found := list(parent.glob(f'*/{name}'))):
    assert time.monotonic() < until, f'{name} did not appear'
    time.sleep(0.02)
  return found
