"""Runs the real paxlite.main with one fault, which FAULT names (for test_faults)."""

import os
import signal
import socket
import sys
import time

import numpy as np

from paxlite import main
from paxlite.checkpointing import checkpoints
from paxlite.core.errors import UserError
from paxlite.data import base
from paxlite.processes import preemption
from paxlite.programs import run
from paxlite.training import evaluation, state_store, step_compiler

fault, _, at = os.environ['FAULT'].partition(':')
reached = preemption.reached
train_batches = base.RowInput.train_batches


def before_step(step, then):
  """Calls `then` before the training loop executes that step."""

  def hook(s, last):
    if s == step:
      then()
    return reached(s, last)

  preemption.reached = hook


def batches_are(change):
  """Makes training read change(number, batch) instead of each batch."""

  def changed(self, start, rows):
    for number, batch in enumerate(train_batches(self, start, rows), start):
      yield change(number, batch)

  base.RowInput.train_batches = changed


def hang():
  print('hanging', flush=True)
  time.sleep(600)


match fault:
  case 'sigterm':
    before_step(int(at), lambda: os.kill(os.getpid(), signal.SIGTERM))
  case 'die' if '--host_idx=1' in sys.argv:
    before_step(int(at), lambda: os.kill(os.getpid(), signal.SIGKILL))
  case 'hang' if '--host_idx=1' in sys.argv:
    before_step(int(at), hang)
  case 'hang_restoring' if '--host_idx=1' in sys.argv:
    state_store.StateStore.initial = lambda self: hang()
  case 'hang_compiling' if '--host_idx=1' in sys.argv:
    step_compiler.StepCompiler.__call__ = lambda *_: hang()
  case 'hang_saving' if '--host_idx=1' in sys.argv:
    checkpoints.Checkpoints.save = lambda *_: hang()
  case 'wait':  # until the test writes a line
    before_step(int(at), lambda: sys.stdin.readline())
  case 'mistake' if '--host_idx=1' in sys.argv:

    def refuse(*_):
      raise UserError('the data is not here')

    run.Run.trainer = refuse
  case 'slow_evaluation':
    evaluation.Evaluator.report = lambda *_: (print('evaluating', flush=True), time.sleep(100))
  case 'failing_checksums' if '--host_idx=0' in sys.argv:

    def fail(folder):
      raise OSError(28, 'No space left on device', str(folder))

    removed = checkpoints.remove
    checkpoints.write_checksums = fail
    checkpoints.remove = lambda folder: (time.sleep(1), removed(folder))
  case 'failing_checksums':
    failed = checkpoints.Checkpoints.raise_failure

    def after(self):
      print('left:', [p.name for p in self._directory.glob('checkpoint_*')])
      failed(self)

    checkpoints.Checkpoints.raise_failure = after
  case 'hang_building' if '--host_idx=1' in sys.argv:
    run.Run.trainer = lambda *_: hang()
  case 'slow_saves':
    write = checkpoints.write_checksums
    checkpoints.write_checksums = lambda folder: (time.sleep(0.5), write(folder))
  case 'clock':  # the clock is a year behind
    now = time.time
    time.time = lambda: now() - 365 * 24 * 3600
    socket.gethostname = lambda: 'elsewhere'
  case 'noise':  # replaces these batches by random tokens
    noisy = {int(number) for number in at.split(',')}

    def noise(number, batch):
      if number not in noisy:
        return batch
      random = np.random.default_rng(number).integers(0, 8192, batch['labels'].shape)
      return batch | {'labels': random.astype(np.int32)}

    batches_are(noise)
  case 'left_out':  # trains as if the batches first-last did not exist
    first, last = map(int, at.split('-'))

    def left_out(self, start, rows):
      start = start if start < first else start + last - first + 1
      for number, batch in enumerate(train_batches(self, start, rows), start):
        if not first <= number <= last:
          yield batch

    base.RowInput.train_batches = left_out

sys.exit(main.main(sys.argv))
