"""Signals to real processes, and the messages that they cause."""

import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from paxlite.checkpointing.checkpoints import Checkpoints
from paxlite.core.errors import EXIT_AGAIN
from paxlite.processes import preemption
from paxlite.training import in_flight, reporting
from tests.support import runs
from tests.support.processes import start, start_processes, wait_for
from tests.unit.training.test_trainer import make

FOREVER = '--fdl.MAX_STEPS=1000000', '--fdl.CHECKPOINT_EVERY_N_STEPS=1000000'


def line_of(stream, beginning: str) -> str:
  for line in stream:
    if line.startswith(beginning):
      return line
  raise AssertionError(f'no line begins with {beginning}')


@pytest.mark.parametrize(
  ('number', 'again'),
  [
    (signal.SIGINT, '; press Ctrl-C again to quit without saving'),
    pytest.param(signal.SIGTERM, '; send it again to quit without saving', marks=pytest.mark.slow),
    pytest.param(signal.SIGHUP, '', marks=pytest.mark.slow),
  ],
)
def test_a_signal_is_reported_at_once_and_saves(tmp_path, number, again):
  """The signal arrives while the main thread waits, as it does for the device."""
  process = start(tmp_path, 'wait:2', *FOREVER)
  wait_for(tmp_path / 'metrics.jsonl')
  process.send_signal(number)
  said = line_of(process.stderr, 'Received')
  assert said == f'Received {number.name}: saving after step 2{again}\n'
  _, stderr = process.communicate('\n', timeout=60)
  assert process.returncode == EXIT_AGAIN
  assert re.fullmatch(
    r'interrupted: asked to leave at step (\d): step \1 is saved. Continue with:',
    stderr.splitlines()[-2],
  )
  assert f'--job_log_dir={tmp_path}' in stderr.splitlines()[-1]


def test_a_signal_does_not_wait_for_the_end_of_an_evaluation(capfd):
  with preemption.listening(owner=True), preemption.evaluating(7):
    assert not preemption.asked_alone()
    os.kill(os.getpid(), signal.SIGINT)
    assert preemption.asked_alone()
    while not (said := capfd.readouterr().err):
      time.sleep(0.01)
  assert said.startswith('Received SIGINT: saving step 7, which the next start evaluates; press')


@pytest.mark.slow
def test_a_second_ctrl_c_after_a_moment_leaves_without_saving(tmp_path):
  process = start(tmp_path, 'wait:2', *FOREVER)
  wait_for(tmp_path / 'metrics.jsonl')
  process.send_signal(signal.SIGINT)
  process.send_signal(signal.SIGINT)  # a process group repeats the signal
  line_of(process.stderr, 'Received SIGINT: ')
  assert process.poll() is None
  time.sleep(0.2)
  process.send_signal(signal.SIGINT)
  assert process.wait(5) == 128 + signal.SIGINT
  assert process.stderr.read() == 'Received SIGINT again: leaving at once, without saving\n'
  assert not (tmp_path / 'checkpoints').exists()
  process.communicate()


@pytest.mark.slow
def test_a_hangup_under_nohup_is_ignored(tmp_path):
  command = runs.command(tmp_path, '--fdl.MAX_STEPS=10', module='tests.support.faulty_main')
  process = subprocess.Popen(
    ['nohup', *command], cwd=runs.ROOT, env=runs.environment() | {'FAULT': 'wait:2'},
    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
  )  # fmt: skip
  wait_for(tmp_path / 'metrics.jsonl')
  process.send_signal(signal.SIGHUP)
  _, stderr = process.communicate('\n', timeout=60)
  assert process.returncode == 0, stderr
  assert 'Received' not in stderr


NOTEBOOK = """
import os, pathlib, signal, subprocess, sys, threading
from paxlite.core.errors import Interrupted
from paxlite.experiments.demo import TinyGPT
from paxlite.programs.run import Run
from paxlite.programs.training import train
from paxlite.processes import preemption

def interrupted_in_the_loop():
  reached = preemption.reached
  def hook(step, last):
    if step == 4:
      os.kill(os.getpid(), signal.SIGINT)
    return reached(step, last)
  preemption.reached = hook

numbers = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
before = [signal.getsignal(n) for n in numbers]
interrupted_in_the_loop()
folder = pathlib.Path(sys.argv[1])
try:
  train(Run(TinyGPT(MAX_STEPS=100), folder))
except Interrupted as e:
  print('raised:', e)
  held = e  # as a notebook keeps the last one, with all that its functions had
assert [signal.getsignal(n) for n in numbers] == before
assert signal.set_wakeup_fd(-1) == -1
lock = 'import pathlib, sys; from paxlite.files.folder_lock import FolderLock;'
lock += 'FolderLock(pathlib.Path(sys.argv[1])).acquire()'
subprocess.run([sys.executable, '-c', lock, str(folder)], check=True)
assert 'signals' not in [t.name for t in threading.enumerate()]
print(sorted(p.name for p in (folder / 'checkpoints').iterdir()))
"""


@pytest.mark.slow
def test_an_interrupt_of_a_notebook_saves_and_handlers_are_back(tmp_path):
  ended = subprocess.run(
    [sys.executable, '-c', NOTEBOOK, str(tmp_path)], cwd=runs.ROOT, env=runs.environment(),
    capture_output=True, text=True, timeout=120, check=False,
  )  # fmt: skip
  assert ended.returncode == 0, ended.stderr
  assert 'raised: asked to leave at step 4: step 4 is saved' in ended.stdout
  assert ended.stdout.splitlines()[-1] == "['checkpoint_00000004']"


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_second_interrupt_of_a_notebook_raises_keyboard_interrupt():
  """It is raised once, in the main thread, and the process continues."""

  def interrupt_twice():
    with preemption.listening():
      os.kill(os.getpid(), signal.SIGINT)
      time.sleep(0.3)
      os.kill(os.getpid(), signal.SIGINT)
      time.sleep(5)

  with pytest.raises(KeyboardInterrupt):
    interrupt_twice()
  with preemption.listening():
    assert not preemption.reached(0, 10)


def test_listening_in_another_thread_does_nothing():
  found = []

  def listen():
    with preemption.listening():
      found.append(signal.getsignal(signal.SIGINT))

  before = signal.getsignal(signal.SIGINT)
  thread = threading.Thread(target=listen)
  thread.start()
  thread.join()
  assert found == [before]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_host_is_at_most_two_steps_ahead(tmp_path, monkeypatch):
  """This holds for any report interval; otherwise a signal would be answered many steps later."""
  t = make(
    tmp_path, MAX_STEPS=12, SUMMARY_INTERVAL_STEPS=1000, CHECKPOINT_EVERY_N_STEPS=1000,
    MODEL_DIMS=256, MAX_SEQ_LEN=256, PERCORE_BATCH_SIZE=8,
  )  # fmt: skip
  dispatched, ahead = [], []
  step = reporting.Reporter.step

  def counted(self, number, metrics, state):
    dispatched.append(metrics['learning/skipped_in_a_row'].value)
    ahead.append(sum(not x.is_ready() for x in dispatched))
    step(self, number, metrics, state)

  monkeypatch.setattr(reporting.Reporter, 'step', counted)
  t.train(*t.store.initial())
  assert max(ahead) == in_flight._MOST
  assert Checkpoints(tmp_path / 'checkpoints').steps() == [12]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_two_processes_save_the_same_steps_by_the_clock(tmp_path):
  flags = '--fdl.MAX_STEPS=20', '--fdl.CHECKPOINT_EVERY_N_STEPS=1000', '--fdl.NUM_LAYERS=1'
  flags += '--fdl.CHECKPOINT_EVERY_N_MINUTES=0.003', '--fdl.CHECKPOINT_MAX_TO_KEEP=1000'
  processes = start_processes(tmp_path, 2, *flags, config='TinyGPT')
  said = [p.communicate(timeout=240)[1] for p in processes]
  assert [p.returncode for p in processes] == [0, 0], said
  saved = sorted((tmp_path / 'checkpoints').glob('checkpoint_*'))
  assert len(saved) > 2
  assert saved[-1].name == 'checkpoint_00000020'
