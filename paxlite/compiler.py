"""What XLA is told about the programs of a run, by the kind of its devices, and what it keeps."""

import contextlib
import hashlib
import logging
import os
import pathlib
import platform as host
import time
from typing import Any

log = logging.getLogger('paxlite')

# Of the train step, and of the program that computes initial values. LLVM's first level makes the
# same bits of these as its last, in a third of the time, and they run once
_TRAIN_STEP: dict[str, dict[str, Any]] = {}
_INITIAL_VALUES: dict[str, dict[str, Any]] = {'cpu': {'xla_backend_optimization_level': 1}}

_PREFIXES = {
  'cpu': ('xla_cpu_',),
  'gpu': ('xla_gpu_',),
  'tpu': ('xla_tpu_', 'xla_enable_async_'),
}

_KEPT_DAYS = 30  # since they were compiled
_FOLDER_VARIABLE = 'JAX_COMPILATION_CACHE_DIR'


def kind(platform: str) -> str:
  """cpu, gpu or tpu of a platform's name in JAX."""
  return {'cuda': 'gpu', 'rocm': 'gpu'}.get(platform, platform)


def of_kind(platform: str, options: dict[str, Any]) -> dict[str, Any]:
  """Those of `options` that are not for another kind of device."""
  others = tuple(p for k, ps in _PREFIXES.items() if k != kind(platform) for p in ps)
  return {name: value for name, value in options.items() if not name.startswith(others)}


def train_step_options(platform: str) -> dict[str, Any]:
  """Of the train step; what XLA_FLAGS says is left to them."""
  return _unless_flags_say(_TRAIN_STEP.get(kind(platform), {}))


def initial_values_options(platform: str) -> dict[str, Any]:
  """Of the program that computes initial values; what XLA_FLAGS says is left to them."""
  return _unless_flags_say(_INITIAL_VALUES.get(kind(platform), {}))


def _unless_flags_say(options: dict[str, Any]) -> dict[str, Any]:
  flags = os.environ.get('XLA_FLAGS', '')
  return {name: value for name, value in options.items() if f'--{name}=' not in flags}


def keep_programs() -> None:
  """Makes JAX keep compiled programs, and XLA what it found to be fast, from run to run.

  They are in a folder of the user's for machines of this kind, paxlite/programs in XDG_CACHE_HOME
  or ~/.cache. JAX_COMPILATION_CACHE_DIR names another one, and
  JAX_ENABLE_COMPILATION_CACHE=false keeps nothing. To be called before JAX is imported.
  """
  if _FOLDER_VARIABLE in os.environ:
    return
  try:
    folder = programs_folder()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = folder.stat()
    # a program is machine code: nobody else may put one there
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
      log.warning('Compiled programs are not kept: others than the user can write to %s', folder)
      return
    remove_old(folder)
  except (OSError, RuntimeError) as e:  # a home that is missing or read-only
    log.warning('Compiled programs are not kept: %s', e)
    return
  os.environ[_FOLDER_VARIABLE] = str(folder)
  # JAX's own bound of a second leaves out what a small model starts with
  os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0.2')


def programs_folder() -> pathlib.Path:
  """Where the programs of machines like this one are kept."""
  base = os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache'
  return pathlib.Path(base) / 'paxlite' / 'programs' / _machine()


def _machine() -> str:
  """Names what a CPU can do: a program for one that can do more ends on one that can do less."""
  features = host.machine()
  with contextlib.suppress(OSError):
    lines = pathlib.Path('/proc/cpuinfo').read_text().splitlines()
    features += next((x for x in lines if x.startswith(('flags', 'Features'))), '')
  return f'{host.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:12]}'


def remove_old(folder: pathlib.Path) -> None:
  """Removes files of more than _KEPT_DAYS days; another process may do so too."""
  before = time.time() - 86400 * _KEPT_DAYS
  for path in folder.iterdir():
    with contextlib.suppress(OSError):
      if path.is_file() and path.stat().st_mtime < before:
        path.unlink()
