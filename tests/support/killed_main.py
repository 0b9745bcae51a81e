"""Runs paxlite.main and kills it with SIGKILL at the moment in KILL_AT (for test_resume)."""

import os
import pathlib
import signal
import sys

from paxlite import main
from paxlite.checkpointing import checkpoints
from paxlite.training import profiling


def kill(*_):
  os.kill(os.getpid(), signal.SIGKILL)


moment, _, step = os.environ['KILL_AT'].partition(':')
if moment == 'before_step':
  is_due = profiling.StepProfiler.is_due  # called before each step
  profiling.StepProfiler.is_due = lambda self, s: kill() if s == int(step) else is_due(self, s)
elif moment == 'mid_save':  # while its files are being written
  save = checkpoints.Checkpoints.save

  def save_and_die(self, s, *args):
    save(self, s, *args)
    if s == int(step):
      kill()

  checkpoints.Checkpoints.save = save_and_die
elif moment == 'configuration':  # between the files of write_configuration
  replace = pathlib.Path.replace

  def replace_or_die(self, target):
    if self.name == 'config.txt.tmp':
      kill()
    return replace(self, target)

  pathlib.Path.replace = replace_or_die
elif moment == 'during_save':  # its files are written, but its folder is not renamed yet
  write = checkpoints.Checkpoints._write_checksums

  def write_and_die(self):
    if self._saving == int(step):
      kill()
    write(self)

  checkpoints.Checkpoints._write_checksums = write_and_die
elif moment == 'after_save':
  save = checkpoints.Checkpoints.save

  def save_and_die(self, s, *args):
    save(self, s, *args)
    if s == int(step):
      self.wait()
      kill()

  checkpoints.Checkpoints.save = save_and_die
else:
  raise ValueError(moment)

sys.exit(main.main(sys.argv))
