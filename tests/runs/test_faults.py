"""Faults of real processes: what a run loses, what it prints, and how it ends.

test_resume has kills during and between saves, and damaged checkpoints. test_slurm has Slurm's
faults.
"""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from paxlite.core.errors import EXIT_AGAIN, Interrupted, UserError
from paxlite.files import folder_lock
from paxlite.files.folder_lock import FolderLock
from paxlite.training import goodput
from paxlite.training.spikes import SpikeDetector
from tests.support import runs
from tests.support.processes import (
  SHORT,
  faulty,
  final_state,
  on_processes,
  start,
  start_processes,
  wait_for,
)

TEXT = 'tests.support.experiments.TinyText'


def evaluations(folder) -> list[tuple[int, float]]:
  return [(r['step'], r['avg_xent']) for r in runs.records(folder, 'eval_metrics.jsonl')]


@pytest.mark.slow
def test_sigterm_saves_and_leaves_with_75_and_nothing_is_lost(tmp_path):
  """The step is due for evaluation, which the continued run does instead."""
  flags = '--fdl.EVAL_INTERVAL_STEPS=3', '--fdl.CHECKPOINT_EVERY_N_STEPS=4', '--fdl.MAX_STEPS=8'
  whole, halves = tmp_path / 'whole', tmp_path / 'halves'
  runs.run(whole, *flags, config=TEXT)
  left = faulty(halves, 'sigterm:6', *flags, config=TEXT, code=EXIT_AGAIN)
  *_, said, command = left.stderr.splitlines()
  assert said == 'interrupted: asked to leave at step 6: step 6 is saved. Continue with:'
  assert command.startswith('python -m paxlite.main ')
  assert f'--job_log_dir={halves}' in command
  assert evaluations(halves)[-1][0] == 3
  assert 'Continuing from the checkpoint of step 6.' in runs.run(halves, *flags, config=TEXT).stdout
  assert runs.losses(halves) == runs.losses(whole)
  assert evaluations(halves) == evaluations(whole)
  report = goodput.report(halves)
  assert report.attempts == 2
  assert report.seconds['lost'] == 0


@pytest.mark.slow
def test_sigterm_after_the_last_step_leaves_its_evaluation_to_do(tmp_path):
  flags = '--fdl.EVAL_INTERVAL_STEPS=100', '--fdl.MAX_STEPS=4'
  faulty(tmp_path, 'sigterm:4', *flags, config=TEXT, code=EXIT_AGAIN)
  assert not (tmp_path / 'eval_metrics.jsonl').exists()
  assert 'eval held_out at step 4: loss' in runs.run(tmp_path, *flags, config=TEXT).stdout
  assert [step for step, _ in evaluations(tmp_path)] == [4]


@pytest.mark.slow
@pytest.mark.parametrize(
  ('step', 'flags'), [(0, []), (2, ['--noenable_checkpoint_saving'])], ids=['first', 'unsaved']
)
def test_sigterm_where_nothing_can_be_saved(tmp_path, step, flags):
  left = faulty(tmp_path, f'sigterm:{step}', *flags, code=EXIT_AGAIN)
  assert f'asked to leave at step {step}: nothing is saved' in left.stderr
  assert not (tmp_path / 'checkpoints').exists()


@pytest.mark.slow
def test_a_second_sigterm_ends_at_once(tmp_path):
  """test_signals has the same test for Ctrl-C."""
  process = start(tmp_path, 'wait:2')
  wait_for(tmp_path / 'metrics.jsonl')
  for _ in range(2):
    process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
  assert process.poll() is None, 'they are taken for one'
  time.sleep(2)
  process.send_signal(signal.SIGTERM)
  assert process.wait(10) == 128 + signal.SIGTERM
  process.communicate()


@pytest.mark.exhaustive
@pytest.mark.slow
def test_sigterm_to_one_of_two_makes_both_save_the_same_step(tmp_path):
  flags = '--fdl.MAX_STEPS=20', '--fdl.CHECKPOINT_EVERY_N_STEPS=1000'
  flags += '--fdl.EVAL_INTERVAL_STEPS=1000', '--fdl.DROPOUT_PROB=0.1'
  whole, halves = tmp_path / 'whole', tmp_path / 'halves'
  on_processes(whole, 2, *flags, config='TinyGPT')
  processes = start_processes(halves, 2, *flags, config='TinyGPT')
  wait_for(halves / 'metrics.jsonl')
  processes[1].send_signal(signal.SIGTERM)
  said = [p.communicate(timeout=60)[1].splitlines()[-1] for p in processes]
  assert [p.returncode for p in processes] == [EXIT_AGAIN, EXIT_AGAIN]
  assert said[0] == said[1]
  (saved,) = (halves / 'checkpoints').glob('checkpoint_*')
  assert f'asked to leave at step {int(saved.name[-8:])}: ' in said[0]
  on_processes(halves, 2, *flags, config='TinyGPT')
  assert runs.losses(halves) == runs.losses(whole)


@pytest.mark.slow
def test_a_worker_that_dies_takes_the_others_with_it_within_15_seconds(tmp_path):
  flags = '--fdl.MAX_STEPS=1000000', '--fdl.CHECKPOINT_EVERY_N_STEPS=1000000'
  processes = start_processes(tmp_path, 2, *flags, config='TinyGPT')
  wait_for(tmp_path / 'metrics.jsonl')
  time.sleep(1)
  processes[1].kill()
  died = time.monotonic()
  _, stderr = processes[0].communicate(timeout=60)
  assert processes[0].returncode == EXIT_AGAIN, stderr
  assert time.monotonic() - died < 15
  assert stderr.splitlines()[-1] == 'stopped: process 0 of 2: process 1 is gone'
  assert runs.records(tmp_path)[-1]['step'] > 1
  processes[1].communicate(timeout=10)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize('count', [2, 4])
def test_the_others_name_process_0_when_it_dies(tmp_path, count):
  flags = '--fdl.MAX_STEPS=1000000', '--fdl.CHECKPOINT_EVERY_N_STEPS=1000000'
  processes = start_processes(tmp_path, count, *flags, config='TinyGPT')
  wait_for(tmp_path / 'metrics.jsonl')
  time.sleep(1)
  processes[0].kill()
  died = time.monotonic()
  for i, process in enumerate(processes[1:], 1):
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == EXIT_AGAIN, stderr
    assert stderr.splitlines()[-1] == f'stopped: process {i} of {count}: process 0 is gone'
  assert time.monotonic() - died < 15
  processes[0].communicate(timeout=10)


@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.slow
@pytest.mark.parametrize('killed', [0, 1])
def test_a_process_that_is_killed_while_the_others_start(tmp_path, killed):
  processes = start_processes(tmp_path, 2, config='TinyGPT')
  for line in processes[0].stdout:  # process 0 prints this line after all processes have met
    if line.startswith('Devices:'):
      break
  processes[killed].kill()
  died = time.monotonic()
  _, stderr = processes[1 - killed].communicate(timeout=100)
  assert processes[1 - killed].returncode == EXIT_AGAIN, stderr
  assert f'process {1 - killed} of 2: process {killed} is gone' in stderr
  assert time.monotonic() - died < 15
  processes[killed].communicate(timeout=10)


@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.slow
@pytest.mark.parametrize(
  ('fault', 'phase', 'theirs'),
  [
    ('hang_building', 'starting and building', 'starting and building'),
    ('hang_restoring', 'initial values or restoring', None),
    ('hang_compiling', 'compiling and the first step', 'compiling and the first step'),
    ('hang_saving', 'saving', None),
  ],
)
def test_every_phase_has_a_deadline_and_names_who_is_waited_for(tmp_path, fault, phase, theirs):
  flags = '--fdl.MAX_STEPS=3', '--fdl.PHASE_TIMEOUT=12', '--fdl.STEP_TIMEOUT=12'
  processes = start_processes(
    tmp_path, 2, *flags, config='TinyGPT', module='tests.support.faulty_main', env={'FAULT': fault}
  )
  ended = [p.communicate(timeout=120)[1] for p in processes]
  assert [p.returncode for p in processes] == [EXIT_AGAIN, EXIT_AGAIN], ended
  assert f'{phase}: no progress for 12 s' in ended[0]
  if theirs is not None:
    assert f'waiting for process 1 ({theirs})' in ended[0]
  assert 'in hang' in (tmp_path / 'stacks' / 'process_00001.txt').read_text()


@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.slow
@pytest.mark.parametrize('stops', [False, True])
def test_a_save_that_fails_in_one_of_two_is_known_to_both(tmp_path, stops):
  flags = '--fdl.MAX_STEPS=9', '--fdl.CHECKPOINT_EVERY_N_STEPS=3'
  processes = start_processes(
    tmp_path, 2, *flags, f'--fdl.STOP_ON_FAILED_SAVE={stops}', config='TinyGPT',
    module='tests.support.faulty_main', env={'FAULT': 'failing_checksums'},
  )  # fmt: skip
  told, ended = zip(*(p.communicate(timeout=120) for p in processes), strict=True)
  assert [p.returncode for p in processes] == [1, 1], ended
  # each process waits until process 0 has removed what is not whole
  left = [line for line in told[1].splitlines() if line.startswith('left: ')]
  assert f'checkpoint_0000000{3 if stops else 9}' not in left[-1]
  assert 'saving failed, training continues: step 3: No space left on device' in ended[0]
  assert 'saving failed, training continues: step 3: OSError: process 0 could not' in ended[1]
  assert 'the last checkpoint was not saved:' in ended[0]
  assert [*(tmp_path / 'checkpoints').glob('*')] == []
  assert max(runs.losses(tmp_path)) == (6 if stops else 9)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_ctrl_c_in_an_evaluation_is_a_line(tmp_path):
  runs.run(tmp_path, '--fdl.MAX_STEPS=1', config=TEXT)
  process = start(tmp_path, 'slow_evaluation', '--mode=eval', config=TEXT)
  for line in process.stdout:
    if line.startswith('evaluating'):
      break
  process.send_signal(signal.SIGINT)
  _, stderr = process.communicate(timeout=30)
  assert process.returncode == 130
  assert stderr.splitlines()[-1] == 'interrupted'
  assert 'Traceback' not in stderr


@pytest.mark.exhaustive
def test_a_worker_that_hangs_ends_the_run_and_every_process_says_where(tmp_path):
  flags = '--fdl.MAX_STEPS=100', '--fdl.STEP_TIMEOUT=6'
  processes = start_processes(
    tmp_path, 2, *flags, config='TinyGPT', module='tests.support.faulty_main',
    env={'FAULT': 'hang:4'},
  )  # fmt: skip
  ended = [p.communicate(timeout=120) for p in processes]
  assert [p.returncode for p in processes] == [EXIT_AGAIN, EXIT_AGAIN]
  for i, (_, stderr) in enumerate(ended):
    stacks = (tmp_path / 'stacks' / f'process_{i:05d}.txt').read_text()
    assert 'productive steps: no progress for 6 s (STEP_TIMEOUT)' in stderr
    assert f'stopped: process {i}: ' in stderr
    assert f'stacks of every thread are in {tmp_path}' in stderr
    assert stacks.count('Thread 0x') >= 2
    assert 'in _loop' in stacks
    assert ('in hang' in stacks) == (i == 1)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_stacks_on_request(tmp_path):
  """At this rate, stacks by faulthandler ended every second run with a segmentation fault."""
  runs.run(tmp_path, '--fdl.STACK_TRACE_INTERVAL=0.002', '--fdl.MAX_STEPS=30')
  stacks = (tmp_path / 'stacks' / 'process_00000.txt').read_text()
  assert stacks.count(' every 0.002 s\n') >= 50
  assert '(MainThread):\n' in stacks
  assert 'trainer.py' in stacks


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_full_queue_of_saves_is_waited_for(tmp_path):
  """The saves take longer than the steps between them."""
  flags = '--fdl.CHECKPOINT_EVERY_N_STEPS=1', '--fdl.MAX_STEPS=5'
  faulty(tmp_path, 'slow_saves', *flags)
  saved = sorted(p.name for p in (tmp_path / 'checkpoints').iterdir())
  assert saved == [f'checkpoint_{i:08d}' for i in range(1, 6)]
  assert 'Training is complete' in runs.run(tmp_path, *flags).stdout


@pytest.mark.exhaustive
@pytest.mark.slow
def test_another_clock_and_another_host_name_do_no_harm(tmp_path):
  runs.run(tmp_path / 'whole', *SHORT)
  runs.run(tmp_path / 'moved', *SHORT, '--fdl.MAX_STEPS=5')
  out = faulty(tmp_path / 'moved', 'clock', *SHORT).stdout
  assert 'Continuing from the checkpoint of step 5.' in out
  assert runs.losses(tmp_path / 'moved') == runs.losses(tmp_path / 'whole')
  mine, other = final_state(tmp_path / 'moved'), final_state(tmp_path / 'whole')
  assert all((mine[k] == other[k]).all() for k in other)
  report = goodput.report(tmp_path / 'moved')
  assert all(v >= 0 for v in report.seconds.values())


@pytest.mark.slow
def test_a_second_run_in_a_folder_is_refused(tmp_path):
  written = lambda: {p: p.stat().st_mtime_ns for p in tmp_path.rglob('*')}
  first = start(tmp_path, 'wait:3')
  wait_for(tmp_path / 'metrics.jsonl')
  before = {}
  while before != (before := written()):  # until the first process waits
    time.sleep(1)
  second = runs.run(tmp_path, code=2)
  assert f'is in use by another run (process {first.pid} on ' in second.stderr
  assert second.stderr.count('\n') == 1
  assert before == written()
  first.kill()
  first.wait()
  lock = FolderLock(tmp_path)  # the kernel has released the lock
  lock.acquire()
  lock.release()


def test_a_lock_of_another_process(tmp_path, monkeypatch):
  code = (
    'import pathlib, sys; from paxlite.files.folder_lock import FolderLock\n'
    'lock = FolderLock(pathlib.Path(sys.argv[1])); lock.acquire(); print("held", flush=True)\n'
    'sys.stdin.readline()'
  )
  holder = subprocess.Popen(
    [sys.executable, '-c', code, str(tmp_path)],
    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=runs.ROOT,
    env=os.environ | {'SLURM_JOB_ID': '77'},
  )  # fmt: skip
  assert holder.stdout.readline() == 'held\n'
  lock = FolderLock(tmp_path)
  with pytest.raises(UserError, match=rf'process {holder.pid} on .*, Slurm job 77\). Wait for it'):
    lock.acquire()
  monkeypatch.setenv('SLURM_JOB_ID', '77')
  monkeypatch.setattr(folder_lock, '_WAIT_SECONDS', 0)
  with pytest.raises(Interrupted, match='an earlier start of this job'):
    lock.acquire()
  holder.communicate('\n')
  lock.acquire()
  lock.acquire()
  lock.release()


@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.skipif(
  subprocess.run(['unshare', '-rm', 'true'], check=False, capture_output=True).returncode != 0,
  reason='needs a mount namespace',
)
@pytest.mark.parametrize(
  ('flags', 'free', 'code'),
  [
    pytest.param((), '14', 0, marks=pytest.mark.slow),
    pytest.param((), '', 1, marks=pytest.mark.slow),
    pytest.param(('--fdl.STOP_ON_FAILED_SAVE=True',), '', 1, marks=pytest.mark.slow),
  ],
)
def test_a_full_disk(tmp_path, flags, free, code):
  """The disk is full from step 10 until step `free`. Of 20 steps, every 4th one is saved."""
  result = tmp_path / 'result'
  env = {'SIZE': '16m', 'FULL': '10', 'SAVED': '8', 'FREE': free, 'RESULT': str(result)}
  ended = subprocess.run(
    ['unshare', '-rm', sys.executable, '-m', 'tests.support.small_disk', '--fdl_config=TinyGPT',
     '--fdl.CHECKPOINT_EVERY_N_STEPS=4', '--fdl.MAX_STEPS=20', *flags],
    cwd=runs.ROOT, env=runs.environment() | env, capture_output=True, text=True, timeout=300,
    check=False,
  )  # fmt: skip
  assert ended.returncode == code, ended.stderr
  assert 'now full' in ended.stdout
  assert 'saving failed, training continues: step 12: ' in ended.stderr
  assert 'No space left on device' in ended.stderr
  saved = {
    int(p.name[-8:]) for p in (tmp_path / 'result' / 'checkpoints').glob('checkpoint_*[0-9]')
  }
  assert saved == ({4, 8, 16, 20} if free else {4, 8}), ended.stderr
  if flags:
    assert 'step 20/20' not in ended.stdout
  else:
    assert 'step 20/20' in ended.stdout
  if code:
    assert 'stopped: the last checkpoint was not saved:' in ended.stderr
    again = runs.run(result, '--fdl.MAX_STEPS=20')
    assert 'Continuing from the checkpoint of step 8.' in again.stdout


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_disk_that_is_full_from_the_start_prints_one_line_for_each_file(tmp_path):
  """Orbax alone would print hundreds of lines, one for each file that it could not write."""
  result = tmp_path / 'result'
  env = {'SIZE': '300k', 'FULL': '-1', 'SAVED': '0', 'RESULT': str(result)}
  ended = subprocess.run(
    ['unshare', '-rm', sys.executable, '-m', 'tests.support.small_disk', '--fdl_config=TinyGPT'],
    cwd=runs.ROOT, env=runs.environment() | env, capture_output=True, text=True, timeout=300,
    check=False,
  )  # fmt: skip
  assert ended.returncode == 1, ended.stderr
  lines = ended.stderr.splitlines()
  assert len(lines) <= 6, ended.stderr
  assert 'Traceback' not in ended.stderr
  assert f'step 10: No space left on device ({tmp_path}/disk/run/checkpoints)' in lines[-1]
  assert 'step 10/10' in ended.stdout


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_file_that_vanishes_while_it_is_read(tmp_path):
  """When the reader reaches the second of two files, it is gone. The trained state is saved."""
  paths = [tmp_path / f'{name}.jsonl' for name in 'ab']
  for path in paths:
    path.write_text(''.join(json.dumps({'text': f'{path} {i} ' * 20}) + '\n' for i in range(200)))
  flags = [
    f'--fdl.TRAIN_SOURCES={[str(p) for p in paths]}',
    '--fdl.VOCAB_PATH=paxlite/data/packaged/text8k.model',
    '--fdl.MAX_STEPS=3000', '--fdl.MAX_EVAL_BATCHES=1', '--fdl.HELD_OUT_EVERY=5',
  ]  # fmt: skip
  process = start(
    tmp_path / 'run', 'wait:3', *flags, config='tests.support.experiments.TinyDocuments'
  )
  wait_for(tmp_path / 'run' / 'metrics.jsonl')
  content = [path.read_bytes() for path in paths]
  for path in paths:
    path.unlink()
  _, stderr = process.communicate('\n', timeout=120)
  assert process.returncode == 2, stderr
  assert '.jsonl: No such file or directory): put it back' in stderr.splitlines()[-1]
  saved = max((tmp_path / 'run' / 'checkpoints').glob('checkpoint_*'))
  assert int(saved.name[-8:]) == runs.records(tmp_path / 'run')[-1]['step']
  for path, data in zip(paths, content, strict=True):
    path.write_bytes(data)
  steps = f'--fdl.MAX_STEPS={int(saved.name[-8:]) + 5}'
  again = runs.run(
    tmp_path / 'run', *flags, steps, config='tests.support.experiments.TinyDocuments'
  )
  assert f'Continuing from the checkpoint of step {int(saved.name[-8:]):,}.' in again.stdout


SPIKE = (
  '--fdl.LOSS_SPIKE_WINDOW=5', '--fdl.CHECKPOINT_EVERY_N_STEPS=10', '--fdl.MAX_STEPS=40',
  '--fdl.LEARNING_RATE=0.02', '--fdl.LR_SCHEDULE=constant', '--fdl.EVAL_INTERVAL_STEPS=100',
)  # fmt: skip


@pytest.mark.exhaustive
def test_a_loss_spike_is_rolled_back_and_its_data_left_out(tmp_path):
  """The run, also after a restart, equals one without the batches from checkpoint to spike."""
  factor = '--fdl.LOSS_SPIKE_FACTOR=1.15'
  spike, clean = tmp_path / 'spike', tmp_path / 'clean'
  out = faulty(spike, 'noise:33', *SPIKE, factor, '--fdl.MAX_STEPS=36', config=TEXT).stdout
  assert 'The loss spiked at step 34: rolled back to the checkpoint of 30.' in out
  faulty(spike, 'noise:33', *SPIKE, factor, config=TEXT)
  faulty(clean, 'left_out:30-33', *SPIKE, config=TEXT)
  assert runs.losses(spike) == runs.losses(clean)
  metadata = spike / 'checkpoints' / 'checkpoint_00000040' / 'data' / 'metadata'
  assert json.loads(metadata.read_text()).items() >= {'skipped_batches': 4, 'rollbacks': 1}.items()
  assert goodput.report(spike).seconds['lost'] > 0


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_second_spike_goes_further_back_where_that_can_be(tmp_path):
  """Two spikes with no checkpoint between them go back to 30, then 20; without 20, to 30 twice."""
  flags = [*SPIKE, '--fdl.LOSS_SPIKE_FACTOR=1.15', '--fdl.LOSS_SPIKE_WINDOW=3']
  out = faulty(tmp_path / 'a', 'noise:33,38', *flags, config=TEXT).stdout
  assert 'spiked at step 34: rolled back to the checkpoint of 30.' in out
  assert 'back to the checkpoint of 20.' in out
  assert (tmp_path / 'a' / 'checkpoints' / 'rolled_back_checkpoint_00000030').is_dir()
  assert runs.records(tmp_path / 'a')[-1]['step'] == 40
  flags += ['--fdl.CHECKPOINT_EVERY_N_STEPS=30']
  out = faulty(tmp_path / 'b', 'noise:33,38', *flags, config=TEXT).stdout
  assert out.count('back to the checkpoint of 30.') == 2
  assert runs.records(tmp_path / 'b')[-1]['step'] == 40


@pytest.mark.exhaustive
@pytest.mark.slow
def test_rollbacks_end(tmp_path):
  """The checkpoint before the spike remains, and the message says where the data is."""
  flags = '--fdl.LOSS_SPIKE_FACTOR=1.15', '--fdl.MAX_ROLLBACKS=0'
  ended = faulty(tmp_path, 'noise:33', *SPIKE, *flags, config=TEXT, code=1)
  assert 'the loss spiked at step 34, after 0 rollbacks (MAX_ROLLBACKS=0)' in ended.stderr
  assert 'or look at rows ' in ended.stderr
  assert (tmp_path / 'checkpoints' / 'checkpoint_00000030').is_dir()


@pytest.mark.slow
def test_a_reader_of_stdout_that_is_gone_stops_nothing(tmp_path):
  process = start(tmp_path, 'wait:3')
  wait_for(tmp_path / 'metrics.jsonl')
  process.stdout.close()
  process.stdin.write('\n')
  process.stdin.close()
  assert process.wait(60) == 0, process.stderr.read()
  process.stderr.close()
  assert runs.records(tmp_path)[-1]['step'] == 10


@pytest.mark.slow
def test_a_mistake_of_one_process_ends_the_others_at_once(tmp_path):
  """A folder is missing on one host only, so its exit code is 2 and that of the others is 75."""
  began = time.monotonic()
  processes = start_processes(
    tmp_path, 2, '--fdl.MAX_STEPS=3', config=TEXT, module='tests.support.faulty_main',
    env={'FAULT': 'mistake'},
  )  # fmt: skip
  said = [p.communicate(timeout=100)[1].splitlines()[-1] for p in processes]
  assert [p.returncode for p in processes] == [EXIT_AGAIN, 2]
  assert said[0] == 'stopped: process 0 of 2: process 1 is gone'
  assert said[1] == 'error: process 1 of 2: the data is not here'
  assert time.monotonic() - began < 60


@pytest.mark.exhaustive
@pytest.mark.slow
def test_evaluation_by_two_processes_ends_at_sigterm(tmp_path):
  runs.run(tmp_path, '--fdl.MAX_STEPS=2', '--fdl.PERCORE_BATCH_SIZE=4', config=TEXT)
  flags = '--mode=eval', '--fdl.MAX_STEPS=2', '--fdl.EVAL_BATCH_SIZE=4'
  processes = start_processes(
    tmp_path, 2, *flags, config=TEXT, module='tests.support.faulty_main',
    env={'FAULT': 'slow_evaluation'},
  )  # fmt: skip
  for line in processes[0].stdout:
    if line == 'evaluating\n':
      break
  for process in processes:
    process.send_signal(signal.SIGTERM)
  assert [p.wait(20) for p in processes] == [-signal.SIGTERM] * 2
  for process in processes:
    process.communicate()


def test_what_a_spike_is():
  spike = SpikeDetector(2.0, 3)
  assert [spike(x) for x in (1.0, 9.0, 1.0)] == [False] * 3, 'no three losses yet'
  assert not spike(float('nan'))
  assert not spike(7.0)  # the mean of the losses before it is 11/3
  assert spike(12.0)
  assert not spike(99.0), 'it starts anew'


def test_goodput_over_restarts(tmp_path):
  folder = tmp_path / 'goodput'
  folder.mkdir()
  seconds = dict.fromkeys(goodput.KINDS, 0.0)
  attempts = [
    {'started': 0, 'ended': 100, 'first_step': 0, 'last_step': 40, 'lost_steps': 0,
     'seconds': seconds | {'init': 20, 'step': 80}},
    # Starts 50 s later at step 30, so ten steps of two seconds are lost; a rollback loses five.
    {'started': 150, 'ended': 250, 'first_step': 30, 'last_step': 75, 'lost_steps': 5,
     'seconds': seconds | {'init': 50, 'step': 50}},
  ]  # fmt: skip
  for i, attempt in enumerate(attempts, 1):
    (folder / f'attempt_{i:05d}.json').write_text(json.dumps(attempt))
  (folder / 'attempt_00003.json').write_text('{')
  report = goodput.report(tmp_path)
  assert report.attempts == 2
  assert report.total == pytest.approx(250)
  assert report.seconds['down'] == 50
  assert report.seconds['lost'] == pytest.approx(20 + 5)
  assert report.goodput == pytest.approx((60 + 45) / 250)
  assert report.line().startswith('Goodput 42.0% of 250 s in 2 starts: starting and building 28.0%')
  assert goodput.report(tmp_path / 'nothing') is None


def test_goodput_of_a_run_that_went_back_twice(tmp_path):
  folder = tmp_path / 'goodput'
  folder.mkdir()
  seconds = dict.fromkeys(goodput.KINDS, 0.0)
  for i, (first, last, spent) in enumerate([(0, 40, 100), (40, 44, 10), (10, 46, 90)], 1):
    attempt = {
      'started': 0, 'ended': 0, 'first_step': first, 'last_step': last, 'lost_steps': 0,
      'seconds': seconds | {'step': spent},
    }  # fmt: skip
    (folder / f'attempt_{i:05d}.json').write_text(json.dumps(attempt))
  assert goodput.report(tmp_path).seconds['lost'] == pytest.approx(75 + 10)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_goodput_adds_up_to_the_wall_time(tmp_path):
  before = time.monotonic()
  runs.run(tmp_path, '--fdl.MAX_STEPS=50')
  wall = time.monotonic() - before
  report = goodput.report(tmp_path)
  assert 0.5 * wall < report.total < wall
  spent = ('init', 'restore', 'compile', 'step', 'save')
  assert all(report.seconds[k] > 0 for k in spent)
  assert sum(report.seconds[k] for k in spent) > 0.9 * report.total


@pytest.mark.exhaustive
def test_elastic_restart(tmp_path):
  """8 steps on one mesh equal a run that continues with other devices, meshes and memories."""

  def train(folder, steps, devices, mesh, *more):
    flags = f'--fdl.MAX_STEPS={steps}', '--fdl.EVAL_INTERVAL_STEPS=100', *more
    flags += f'--fdl.PERCORE_BATCH_SIZE={4 / devices}', f'--fdl.ICI_MESH_SHAPE={mesh}'
    flags += '--fdl.USE_REPEATED_LAYER=True', '--fdl.NUM_LAYERS=4'
    runs.run(tmp_path / folder, *flags, devices=devices, config=TEXT)

  four_axes = '--fdl.DCN_MESH_SHAPE=[1,1,1,1]'
  train('fixed', 8, 4, '[2,2,1]')
  train('elastic', 2, 4, '[2,2,1]')
  train(
    'elastic', 4, 4, '[2,1,1,2]', four_axes, '--fdl.MESH_AXES=[stage,replica,data,mdl]',
    '--fdl.NUM_MICROBATCHES=2', '--fdl.NUM_PIPELINE_REPEATS=2',
  )  # fmt: skip
  train(
    'elastic', 6, 2, '[1,1,1,2]', four_axes, '--fdl.MESH_AXES=[replica,data,mdl,context]',
    '--fdl.CONTEXT_ATTENTION=ring',
  )  # fmt: skip
  train('elastic', 8, 1, '[1,1,1]', '--fdl.OFFLOAD_OPTIMIZER=True')
  fixed, found = runs.losses(tmp_path / 'fixed'), runs.losses(tmp_path / 'elastic')
  assert found.keys() == fixed.keys()
  assert max(abs(found[s] - fixed[s]) for s in fixed) < 1e-4
