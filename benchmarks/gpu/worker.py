"""Processes that measure one case or probe each, and import what they need before their turn."""

import contextlib
import functools
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from typing import IO, Self

from benchmarks.gpu.cases import KINDS, Values, find, kind
from benchmarks.gpu.device import PROBES, Result
from benchmarks.gpu.processes import joined
from benchmarks.gpu.sizes import MEMORY_FRACTION

# What a process imports before its turn; to import them takes no memory of the device.
_JAX = ('jax', 'fiddle', 'optax', 'paxlite.experiments.language_model')
_IMPORTS = {
  'train': (*_JAX, 'paxlite.compilation.compiled_step', 'paxlite.training.sharded_task'),
  'decode': (*_JAX, 'paxlite.generation.engine', 'paxlite.generation.fused_projections'),
  'start': _JAX,
  'torch': ('torch', 'transformers'),
}


class Worker:
  """A process that imports the libraries of a case at once, and measures it when it is asked.

  The next case's process imports while the present one measures. Its child processes are ended with
  it, because torch's compilers would keep its files open.
  """

  def __init__(self, name: str) -> None:
    environment = dict(os.environ)
    if name not in PROBES:
      model, variant = find(name)
      environment |= model.environment | variant.environment
    if 'XLA_CLIENT_MEM_FRACTION' not in environment:  # its newer name; JAX refuses both at once
      environment.setdefault('XLA_PYTHON_CLIENT_MEM_FRACTION', str(MEMORY_FRACTION))
    self.name = name
    file = functools.partial(tempfile.TemporaryFile, 'w+', encoding='utf-8', errors='replace')
    self._out, self._error = file(), file()
    self._process = subprocess.Popen(
      [sys.executable, '-m', 'benchmarks.gpu', f'--serve={name}'],
      stdin=subprocess.PIPE,
      stdout=self._out,
      stderr=self._error,
      env=environment,
      start_new_session=True,
      text=True,
    )

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def close(self) -> None:
    """Ends the process and its children."""
    with contextlib.suppress(ProcessLookupError):
      os.killpg(self._process.pid, signal.SIGKILL)
    with contextlib.suppress(BrokenPipeError):
      self._process.communicate()
    self._out.close()
    self._error.close()

  def answer(self, task: Values, seconds: float) -> Result | None:
    """Returns the result of `measure` with the task's arguments; None if it took too long."""
    with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired):
      self._process.communicate(json.dumps(task) + '\n', seconds)
    code = self._process.poll()
    for told in _written(self._out):
      if told.startswith('@'):
        return json.loads(told[1:])
    if code is None:
      return None
    last = (_written(self._error) or ['no word'])[-1]
    return {'status': 'failed', 'reason': f'exit code {code}: {last[:300]}'}


class Queue:
  """The workers of cases in their order, of which one is started ahead of its turn."""

  def __init__(self, names: list[str]) -> None:
    self._names = names
    self._ahead: Worker | None = None

  def next(self, name: str) -> Worker:
    """Returns the worker of a case, and starts that of the case after it.

    Not beside a case that measures how long a process takes to start.
    """
    worker, self._ahead = self._ahead, None
    if worker is not None and worker.name != name:  # a case before it was skipped
      worker.close()
      worker = None
    worker = worker or Worker(name)
    after = self._names[self._names.index(name) + 1 :]
    if after and kind(name) != 'start':
      self._ahead = Worker(after[0])
    return worker

  def close(self) -> None:
    """Ends the process that was started ahead."""
    if self._ahead is not None:
      self._ahead.close()


def _written(file: IO[str]) -> list[str]:
  file.seek(0)
  return file.read().strip().splitlines()


def serve(name: str) -> None:
  """Imports what a case needs, waits for its task, and prints its result after an @."""
  if name not in PROBES:
    for module in _IMPORTS[kind(name)]:
      with contextlib.suppress(ImportError):  # the case says what is missing
        importlib.import_module(module)
  if task := sys.stdin.readline():
    print('@' + json.dumps(measured(name, **json.loads(task))), flush=True)


def measured(name: str, tiny: bool, most: int | None = None, sizes: Values | None = None) -> Result:
  """Returns the result of a case or probe, or the reason why there is none.

  Args:
    name: Name of a case or a probe.
    tiny: See --tiny.
    most: Largest value of the fitted attribute.
    sizes: Sizes of a model that is not an experiment.
  """
  from paxlite.core.errors import UserError

  try:
    if name in PROBES:
      result = PROBES[name](tiny)
    else:
      module = importlib.import_module(KINDS[kind(name)])
      with joined(name, dict(tiny=tiny, most=most, sizes=sizes)):
        result = module.measure(name, tiny, most, sizes or {})
    return result | {'status': 'ok'}
  except UserError as e:
    return {'status': 'skipped', 'reason': str(e)}
  except Exception as e:  # out of memory or a compiler error: other cases still run
    first = (str(e).strip().splitlines() or [''])[0]
    return {'status': 'failed', 'reason': f'{type(e).__name__}: {first[:300]}'}
