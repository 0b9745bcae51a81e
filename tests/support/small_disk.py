"""Runs paxlite.main on a disk of SIZE that is full from step FULL on, as soon as the checkpoint of
step SAVED is there (for test_faults).

In a mount namespace of its own: the disk is a tmpfs that nobody else sees, and that goes with the
process. What is on it at the end is copied to RESULT.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import time

from paxlite import main
from paxlite.runtime import preemption

size, result = os.environ['SIZE'], os.environ['RESULT']
full, saved = int(os.environ['FULL']), int(os.environ['SAVED'])
disk = pathlib.Path(result).with_name('disk')
disk.mkdir()
subprocess.run(['mount', '-t', 'tmpfs', '-o', f'size={size}', 'tmpfs', disk], check=True)
reached = preemption.reached


def fill(step, last):
  """Leaves no block free before step `full`, and frees them where the environment says so."""
  ballast = disk / 'ballast'
  if step == full:
    while not (disk / 'run' / 'checkpoints' / f'checkpoint_{saved:08d}').is_dir():
      time.sleep(0.01)
    try:
      with ballast.open('wb', buffering=0) as f:
        while True:
          f.write(b'x' * 4096)
    except OSError as e:
      print('now full:', e, flush=True)
  if str(step) == os.environ.get('FREE'):
    ballast.unlink()
  return reached(step, last)


preemption.reached = fill
code = main.main([*sys.argv, f'--job_log_dir={disk / "run"}'])
shutil.copytree(disk / 'run', result)
sys.exit(code)
