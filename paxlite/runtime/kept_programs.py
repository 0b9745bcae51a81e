"""Compiled programs that are kept from run to run, each with a checksum.

JAX reads and writes them through one object with `get` and `put`. Its own one notices most damage,
but not all: of 86 flipped bits 9 went unnoticed and 6 ended the process. The one here adds a
checksum to each program, and drops a program that does not have it.
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

from paxlite.core.ownership import open_to_others

_KEPT_DAYS = 30  # since they were compiled
_LEAST_SECONDS = 0.2  # of compiling, for a program to be kept
_SUFFIX = '-program'
_MARK = b'paxlite1'  # before the CRC-32C, at the end of a file

log = logging.getLogger('paxlite')


def keep_programs() -> None:
  """Makes JAX keep compiled programs, and XLA what it found to be fast, from run to run.

  They are in a folder of the user's for machines of this kind, paxlite/programs in XDG_CACHE_HOME
  or ~/.cache. JAX_COMPILATION_CACHE_DIR names another one, which JAX manages by itself, and
  JAX_ENABLE_COMPILATION_CACHE=false keeps nothing. To be called before anything is compiled, and by
  a process alone: of several, which tune GPU kernels together, one that found its program would
  leave the others waiting.
  """
  import jax
  from jax._src import compilation_cache

  config: Any = jax.config
  jax_cache: Any = compilation_cache
  if config.jax_compilation_cache_dir or not config.jax_enable_compilation_cache:
    return
  if not hasattr(jax_cache, 'get_file_cache'):  # it is not of JAX's public interface
    log.warning('Compiled programs are not kept: jax %s reads them in another way', jax.__version__)
    return
  try:
    folder = programs_folder()
    for path in reversed([folder, *folder.parents]):
      if not path.exists():  # another process may make it now
        path.mkdir(mode=0o700, exist_ok=True)
    folder = folder.resolve()
    if (others := open_to_others(folder)) is not None:  # a program is machine code
      log.warning('Compiled programs are not kept: others than the user can write to %s', others)
      return
    remove_old(folder)
  except (OSError, RuntimeError) as e:  # a home that is missing or read-only
    log.warning('Compiled programs are not kept: %s', e)
    return
  original = jax_cache.get_file_cache
  jax_cache.get_file_cache = lambda path: (
    (KeptPrograms(folder), path) if path == str(folder) else original(path)
  )
  config.update('jax_compilation_cache_dir', str(folder))
  # JAX's own bound of a second leaves out what a small model starts with
  config.update('jax_persistent_cache_min_compile_time_secs', _LEAST_SECONDS)


class KeptPrograms:
  """The programs in a folder, as JAX's compilation cache asks for them.

  Args:
    folder: Exists.
  """

  def __init__(self, folder: pathlib.Path):
    self._path = folder  # JAX names it in its messages

  def get(self, key: str) -> bytes | None:
    """The program as it was put; None where there is none, or it is damaged and now removed."""
    path = self._path / f'{key}{_SUFFIX}'
    try:
      content = path.read_bytes()
    except FileNotFoundError:
      return None
    except OSError as e:
      log.warning('The compiled program %s cannot be read (%s): it is compiled again', path, e)
      return None
    end = len(_MARK) + 4
    program = content[:-end]
    if content[-end:] == _MARK + _checksum(key, program):
      return program
    log.warning('The compiled program %s is damaged: it is removed and compiled again', path)
    with contextlib.suppress(OSError):
      path.unlink()
    return None

  def put(self, key: str, value: bytes) -> None:
    """Keeps a program; a failure is logged, and changes nothing."""
    path = self._path / f'{key}{_SUFFIX}'
    unfinished = path.with_name(f'.{os.getpid()}{_SUFFIX}.unfinished')
    try:
      unfinished.write_bytes(value + _MARK + _checksum(key, value))
      unfinished.replace(path)  # readers see a whole file or none
    except OSError as e:
      log.warning('The compiled program %s is not kept: %s', path, e)
      with contextlib.suppress(OSError):
        unfinished.unlink()


def _checksum(key: str, program: bytes) -> bytes:
  """The checksum of a program and its key, so that two files that are exchanged are noticed."""
  crc = google_crc32c.extend(google_crc32c.value(key.encode()), program)
  return int(crc).to_bytes(4, 'big')


def programs_folder() -> pathlib.Path:
  """The folder of the compiled programs of machines like this one."""
  base = os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache'
  return pathlib.Path(base) / 'paxlite' / 'programs' / _machine()


def _machine() -> str:
  """Names what a CPU can do: a program for one that can do more ends on one that can do less."""
  features = platform.machine()
  with contextlib.suppress(OSError):
    lines = pathlib.Path('/proc/cpuinfo').read_text().splitlines()
    features += next((x for x in lines if x.startswith(('flags', 'Features'))), '')
  return f'{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:12]}'


def remove_old(folder: pathlib.Path) -> None:
  """Removes files of more than _KEPT_DAYS days; another process may do so too."""
  before = time.time() - 86400 * _KEPT_DAYS
  for path in folder.iterdir():
    with contextlib.suppress(OSError):
      if path.is_file() and path.stat().st_mtime < before:
        path.unlink()
