"""Compiled programs that are kept from run to run, each with a checksum.

JAX reads and writes them through one object with the methods `get` and `put`. JAX's own object
detects most damage, but not all: of 86 flipped bits, 9 were not detected and 6 ended the process.
The object here adds a checksum to each program, and removes a program whose checksum is wrong.
"""

import contextlib
import hashlib
import logging
import os
import pathlib
import platform
import time
from typing import Any

import google_crc32c

from paxlite.files.ownership import open_to_others

_KEPT_DAYS = 30  # days since a program was compiled
_LEAST_SECONDS = 0.2  # A program that compiles faster than this is not kept.
_SUFFIX = '-program'
_MARK = b'paxlite1'  # precedes the CRC-32C at the end of a file

log = logging.getLogger('paxlite')


def enable() -> None:
  """Makes JAX keep compiled programs, and XLA its autotuning results, from run to run.

  They are kept in the user's cache folder, in a subfolder of paxlite/programs for this kind of
  machine; the cache folder is XDG_CACHE_HOME or ~/.cache. JAX_COMPILATION_CACHE_DIR names another
  folder, which JAX manages by itself. JAX_ENABLE_COMPILATION_CACHE=false keeps nothing.

  Call this before anything is compiled, and only in a run of one process. Several processes tune
  GPU kernels together, so one that found its program in the cache would leave the others waiting.
  """
  import jax
  from jax._src import compilation_cache

  config: Any = jax.config  # JAX declares no option of it
  jax_cache: Any = compilation_cache
  if config.jax_compilation_cache_dir or not config.jax_enable_compilation_cache:
    return
  if not hasattr(jax_cache, 'get_file_cache'):  # It is no public function of JAX.
    log.warning('Compiled programs are not cached: jax %s reads them differently', jax.__version__)
    return
  try:
    folder = programs_folder()
    for path in reversed([folder, *folder.parents]):
      if not path.exists():  # Another process may create it at the same moment.
        path.mkdir(mode=0o700, exist_ok=True)
    folder = folder.resolve()
    if (others := open_to_others(folder)) is not None:  # A program is machine code.
      log.warning('Compiled programs are not cached: other users can write to %s', others)
      return
    remove_old(folder)
  except (OSError, RuntimeError) as e:  # The home folder is missing or read-only.
    log.warning('Compiled programs are not cached: %s', e)
    return
  original = jax_cache.get_file_cache
  jax_cache.get_file_cache = lambda path: (
    (CompilationCache(folder), path) if path == str(folder) else original(path)
  )
  config.update('jax_compilation_cache_dir', str(folder))
  # JAX's default of one second would leave out the programs that a small model starts with.
  config.update('jax_persistent_cache_min_compile_time_secs', _LEAST_SECONDS)


class CompilationCache:
  """The compiled programs in a folder, with the interface that JAX's compilation cache expects.

  Args:
    folder: An existing folder.
  """

  def __init__(self, folder: pathlib.Path):
    self._path = folder  # JAX reads this attribute for its messages.

  def get(self, key: str) -> bytes | None:
    """Returns a stored program, or None if there is none or it was damaged and is now removed."""
    path = self._path / f'{key}{_SUFFIX}'
    try:
      content = path.read_bytes()
    except FileNotFoundError:
      return None
    except OSError as e:
      log.warning('Cannot read the compiled program %s (%s): compiling it again', path, e)
      return None
    end = len(_MARK) + 4
    program = content[:-end]
    if content[-end:] == _MARK + _checksum(key, program):
      return program
    log.warning('The compiled program %s is damaged: removing it and compiling again', path)
    with contextlib.suppress(OSError):
      path.unlink()
    return None

  def put(self, key: str, value: bytes) -> None:
    """Stores a program; a failure is only logged."""
    path = self._path / f'{key}{_SUFFIX}'
    unfinished = path.with_name(f'.{os.getpid()}{_SUFFIX}.unfinished')
    try:
      unfinished.write_bytes(value + _MARK + _checksum(key, value))
      unfinished.replace(path)  # Readers see a complete file or none.
    except OSError as e:
      log.warning('The compiled program %s is not cached: %s', path, e)
      with contextlib.suppress(OSError):
        unfinished.unlink()


def _checksum(key: str, program: bytes) -> bytes:
  """Returns the CRC-32C of key and program; with the key, swapped files are detected too."""
  crc = google_crc32c.extend(google_crc32c.value(key.encode()), program)
  return int(crc).to_bytes(4, 'big')


def programs_folder() -> pathlib.Path:
  """Returns the folder for the programs of machines like this one."""
  return cache_folder() / 'programs' / _machine()


def cache_folder() -> pathlib.Path:
  """Returns the folder of what paxlite keeps for this user and can make again."""
  base = os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache'
  return pathlib.Path(base) / 'paxlite'


def _machine() -> str:
  """Returns a name for the CPU's instruction sets.

  A program compiled for a CPU with more instructions would crash on a CPU with fewer.
  """
  features = platform.machine()
  with contextlib.suppress(OSError):
    lines = pathlib.Path('/proc/cpuinfo').read_text().splitlines()
    features += next((x for x in lines if x.startswith(('flags', 'Features'))), '')
  return f'{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:12]}'


def remove_old(folder: pathlib.Path) -> None:
  """Removes files older than _KEPT_DAYS days; another process may do so at the same time."""
  before = time.time() - 86400 * _KEPT_DAYS
  for path in folder.iterdir():
    with contextlib.suppress(OSError):
      if path.is_file() and path.stat().st_mtime < before:
        path.unlink()
