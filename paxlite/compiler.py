"""What XLA is told about the programs of a run, by the kind of its devices, and what it keeps."""

import contextlib
import hashlib
import logging
import os
import pathlib
import platform as host
import stat
import time
from typing import Any

log = logging.getLogger('paxlite')

# Of the program that computes initial values, which runs once: LLVM's first level makes the same
# bits of it as its last, in a third of the time
_INITIAL_VALUES: dict[str, dict[str, Any]] = {'cpu': {'xla_backend_optimization_level': 1}}

_PREFIXES = {
  'cpu': ('xla_cpu_',),
  'gpu': ('xla_gpu_',),
  'tpu': ('xla_tpu_', 'xla_enable_async_'),
}

_KEPT_DAYS = 30  # since they were compiled
_LEAST_SECONDS = 0.2  # of compiling, for a program to be kept


def kind(platform: str) -> str:
  """cpu, gpu or tpu of a platform's name in JAX."""
  return {'cuda': 'gpu', 'rocm': 'gpu'}.get(platform, platform)


def of_kind(platform: str, options: dict[str, Any]) -> dict[str, Any]:
  """Those of `options` that are not for another kind of device."""
  others = tuple(p for k, ps in _PREFIXES.items() if k != kind(platform) for p in ps)
  return {name: value for name, value in options.items() if not name.startswith(others)}


def initial_values_options(platform: str) -> dict[str, Any]:
  """Of the program that computes initial values; what XLA_FLAGS says is left to them."""
  flags = os.environ.get('XLA_FLAGS', '')
  options = _INITIAL_VALUES.get(kind(platform), {})
  return {name: value for name, value in options.items() if f'--{name}=' not in flags}


def keep_programs() -> None:
  """Makes JAX keep compiled programs, and XLA what it found to be fast, from run to run.

  They are in a folder of the user's for machines of this kind, paxlite/programs in XDG_CACHE_HOME
  or ~/.cache. JAX_COMPILATION_CACHE_DIR names another one, and
  JAX_ENABLE_COMPILATION_CACHE=false keeps nothing. To be called before anything is compiled, and by
  a process alone: of several, which tune GPU kernels together, one that found its program would
  leave the others waiting.
  """
  import jax

  config: Any = jax.config
  if config.jax_compilation_cache_dir or not config.jax_enable_compilation_cache:
    return
  try:
    folder = programs_folder()
    for path in reversed([folder, *folder.parents]):
      if not path.exists():  # another process may make it now
        path.mkdir(mode=0o700, exist_ok=True)
    folder = folder.resolve()
    if not _only_the_user_writes(folder):  # a program is machine code
      log.warning('Compiled programs are not kept: others than the user can write to %s', folder)
      return
    remove_old(folder)
  except (OSError, RuntimeError) as e:  # a home that is missing or read-only
    log.warning('Compiled programs are not kept: %s', e)
    return
  config.update('jax_compilation_cache_dir', str(folder))
  # JAX's own bound of a second leaves out what a small model starts with
  config.update('jax_persistent_cache_min_compile_time_secs', _LEAST_SECONDS)


def _only_the_user_writes(folder: pathlib.Path) -> bool:
  """Whether nobody but the user and root can change a folder or put another one in its place."""
  for path in (folder, *folder.parents):
    status = path.stat()
    open_to_others = status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX
    if status.st_uid not in (0, os.getuid()) or open_to_others:
      return False
  return True


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
