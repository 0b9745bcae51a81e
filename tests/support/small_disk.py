"""Runs paxlite.main on a disk of SIZE, which becomes full at step FULL (for test_faults).

Step FULL first waits for the checkpoint of step SAVED. The disk is a tmpfs in a mount namespace of
this process, so nobody else sees it, and it ends with the process. Its files are copied to RESULT.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import time

from paxlite import main
from paxlite.processes import preemption

size, result = os.environ['SIZE'], os.environ['RESULT']
full, saved = int(os.environ['FULL']), int(os.environ['SAVED'])
disk = pathlib.Path(result).with_name('disk')
disk.mkdir()
subprocess.run(['mount', '-t', 'tmpfs', '-o', f'size={size}', 'tmpfs', disk], check=True)
reached = preemption.reached


def fill(step, last):
  """Fills the disk before step `full`, and frees it before the step that FREE names."""
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
