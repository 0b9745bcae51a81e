"""Measures the first and the second start of a run of one step: processes of paxlite.main."""

import os
import subprocess
import sys
import tempfile
import time

from benchmarks.gpu.cases import Values, find
from benchmarks.gpu.device import Result
from benchmarks.gpu.sizes import attributes, experiment, parameters


def measure(name: str, tiny: bool, most: int | None, sizes: Values) -> Result:
  """Starts a case twice; the second start finds the programs that the first one compiled.

  Seconds are from the start of a process to its end, after one step. Nothing is saved. This process
  opens no device, because the runs need all of its memory.
  """
  del most, sizes
  e = experiment(name, tiny)
  with tempfile.TemporaryDirectory() as kept:
    first, second = (seconds(name, tiny, kept) for _ in range(2))
  return {
    'layers': e.NUM_LAYERS,
    'fitted': {},
    'batch': [e.batch_size, e.MAX_SEQ_LEN],
    'parameters': parameters(e),
    'first_seconds': first,
    'second_seconds': second,
  }


def seconds(name: str, tiny: bool, kept: str) -> float:
  """Returns the seconds of a run that keeps its programs in a folder.

  Raises:
    RuntimeError: The run failed; the message is its last line.
  """
  values = attributes(name, tiny) | dict(MAX_STEPS=1)
  flags = [f'--fdl.{key}={value}' for key, value in values.items()]
  environment = {k: v for k, v in os.environ.items() if not k.startswith('JAX_COMPILATION_CACHE')}
  with tempfile.TemporaryDirectory() as folder:
    command = [
      *(sys.executable, '-m', 'paxlite.main', f'--fdl_config={find(name)[0].experiment}'),
      *(f'--job_log_dir={folder}', '--noenable_checkpoint_saving', *flags),
    ]
    before = time.perf_counter()
    done = subprocess.run(
      command,
      env=environment | dict(XDG_CACHE_HOME=kept, JAX_ENABLE_COMPILATION_CACHE='true'),
      capture_output=True,
      text=True,
      check=False,
    )
    took = time.perf_counter() - before
  if done.returncode:
    raise RuntimeError((done.stderr.strip().splitlines() or ['no word'])[-1])
  return took
