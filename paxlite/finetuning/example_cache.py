"""Arrays that are made once from files, and then read: the encoded examples of fine-tuning.

    <folder>/<key>/meta.json    dtype, size and CRC-32C of each array, and facts as JSON
    <folder>/<key>/<name>.bin   the values of an array, little-endian

The key is a checksum of all that the arrays depend on. They are written into a folder of another
name, which is renamed when it is whole, so that a killed process leaves nothing that is read.
"""

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import logging
import os
import pathlib
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import IO, Any, Literal

import google_crc32c
import numpy as np

from paxlite.core.errors import UserError, naming
from paxlite.core.json_text import JsonObject
from paxlite.data import checked_files
from paxlite.data.file_array import FileArray
from paxlite.files.json_files import read_object

log = logging.getLogger('paxlite')

OFF = 'off'
_META = 'meta.json'
_UNFINISHED = '.unfinished'
_LOCK = '.lock'
_KEPT_DAYS = 30  # for which arrays are kept that nobody opens
_WAIT_SECONDS = 0.5


@dataclasses.dataclass(frozen=True)
class Arrays:
  """Arrays by their names, in memory or in files, and facts about them."""

  arrays: Mapping[str, Any]
  facts: JsonObject
  is_in_files: bool = False


class ArrayWriter:
  """Appends to arrays, which are in files of `folder`; None: in memory."""

  def __init__(self, folder: pathlib.Path | None = None):
    self._folder = folder
    self._parts: dict[str, list[np.ndarray]] = {}
    self._files: dict[str, IO[bytes]] = {}
    self._about: dict[str, dict[str, Any]] = {}

  def append(self, arrays: Mapping[str, np.ndarray]) -> None:
    """Appends to arrays by their names; each call has the same names and dtypes."""
    for name, array in arrays.items():
      if self._folder is None:
        self._parts.setdefault(name, []).append(array)
        continue
      path = self._folder / f'{name}.bin'
      if name not in self._files:
        self._files[name] = path.open('wb')
        self._about[name] = {'dtype': array.dtype.str, 'bytes': 0, 'crc32c': 0}
      about, data = self._about[name], array.tobytes()
      with naming(path):
        self._files[name].write(data)
      about['bytes'] += len(data)
      about['crc32c'] = google_crc32c.extend(about['crc32c'], data)

  def in_memory(self) -> dict[str, np.ndarray]:
    return {name: np.concatenate(parts) for name, parts in self._parts.items()}

  def finish(self, facts: JsonObject) -> None:
    """Writes what is not yet on the disk, and last the note that the files are whole."""
    assert self._folder is not None
    for file in self._files.values():
      with naming(file.name):
        file.flush()
        os.fsync(file.fileno())
    meta = {'arrays': self._about, 'facts': facts}
    path = self._folder / _META
    with naming(path):
      path.write_text(json.dumps(meta | {'crc32c': _checksum(meta)}))

  def close(self) -> None:
    for file in self._files.values():
      with contextlib.suppress(OSError):  # a full disk has been reported
        file.close()


class ExampleCache:
  """Keeps arrays by a key.

  Args:
    folder: The folder of all keys; '': paxlite/examples in XDG_CACHE_HOME or ~/.cache; 'off': they
      are kept in memory.
  """

  def __init__(self, folder: str = ''):
    base = os.environ.get('XDG_CACHE_HOME') or '~/.cache'
    chosen = pathlib.Path(folder or f'{base}/paxlite/examples').expanduser()
    self._folder = None if folder == OFF else chosen

  @property
  def is_off(self) -> bool:
    return self._folder is None

  def get(
    self, key: JsonObject, make: Callable[[ArrayWriter], JsonObject], lazy: Collection[str] = ()
  ) -> Arrays:
    """Returns the arrays of a key. Of several processes that ask for them, one makes them.

    Args:
      key: All that the arrays depend on.
      make: Writes them, and returns facts.
      lazy: Names of arrays of which only what is asked for is read.

    Raises:
      UserError: They cannot be written; or what `make` raises.
    """
    if self._folder is None:
      return in_memory(make)
    folder = self._folder
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    place = folder / name
    is_damaged = place.is_dir()
    if found := _opened(place, lazy):
      return found
    try:
      folder.mkdir(mode=0o700, parents=True, exist_ok=True)
      with _alone(folder / f'{name}{_LOCK}') as state:
        if state == 'waited' or not is_damaged:  # meanwhile, another process may have made it
          found = _opened(place, lazy)
        if found is None:
          _remove_old(folder, '' if state == 'unlocked' else name)
          _make(place, make, lazy)
      found = found or _opened(place, lazy)
    except OSError as e:
      if not str(e.filename or '').startswith(str(folder)):
        raise
      raise UserError(
        f'{folder} cannot be written ({e.strerror}): make room there, or EXAMPLE_CACHE=FOLDER '
        'names another place; EXAMPLE_CACHE=off keeps the examples in memory'
      ) from None
    if found is None:
      raise UserError(f'{place} cannot be read back: its disk may be damaged. EXAMPLE_CACHE=FOLDER '
                      'names another place')  # fmt: skip
    return found


def in_memory(make: Callable[[ArrayWriter], JsonObject]) -> Arrays:
  """Returns what `make` writes and returns."""
  writer = ArrayWriter()
  facts = make(writer)
  return Arrays(writer.in_memory(), facts)


def checksum_of_code(*folders: pathlib.Path) -> str:
  """Returns a checksum of the Python files in folders, with which what they make may change."""
  found = hashlib.sha256()
  for path in sorted(path for folder in folders for path in folder.rglob('*.py')):
    found.update(path.read_bytes())
  return found.hexdigest()


def _make(
  place: pathlib.Path, make: Callable[[ArrayWriter], JsonObject], lazy: Collection[str]
) -> None:
  unfinished = tempfile.mkdtemp(prefix=f'{place.name}.', suffix=_UNFINISHED, dir=place.parent)
  writer = ArrayWriter(pathlib.Path(unfinished))
  try:
    writer.finish(make(writer))
    if place.exists() and _opened(place, lazy) is None:
      shutil.rmtree(place, ignore_errors=True)
    try:
      os.rename(unfinished, place)
    except OSError as e:  # where locks do not work, another process may have been faster
      if e.errno not in (errno.EEXIST, errno.ENOTEMPTY):
        raise
  finally:
    writer.close()
    shutil.rmtree(unfinished, ignore_errors=True)


def _checksum(meta: JsonObject) -> int:
  return int(google_crc32c.value(json.dumps(meta).encode()))


def _opened(place: pathlib.Path, lazy: Collection[str]) -> Arrays | None:
  """Returns the arrays in a folder; None if they are missing, or damaged, which is reported."""
  if not place.is_dir():
    return None
  try:
    meta = read_object(place / _META)
    if meta.pop('crc32c') != _checksum(meta):
      raise ValueError(f'{_META} has another checksum')
    arrays: dict[str, Any] = {}
    for name, about in meta['arrays'].items():
      path = place / f'{name}.bin'
      if path.stat().st_size != about['bytes']:
        raise ValueError(f'{path.name} has {path.stat().st_size:,} bytes, not {about["bytes"]:,}')
      if name in lazy and about['bytes']:
        checked_files.check(path, about['crc32c'])
        arrays[name] = FileArray(path, about['dtype'])
        continue
      data = path.read_bytes()
      if google_crc32c.value(data) != about['crc32c']:
        raise ValueError(f'{path.name} has another checksum')
      arrays[name] = np.frombuffer(data, about['dtype'])
    with contextlib.suppress(OSError):  # somebody else's
      os.utime(place / _META)
    return Arrays(arrays, meta['facts'], is_in_files=True)
  except (OSError, KeyError, TypeError, AttributeError, ValueError) as e:  # also UserError
    if place.is_dir():
      log.warning('%s is damaged and made again: %s', place, e)
    return None


def _remove_old(folder: pathlib.Path, name: str) -> None:
  """Removes what killed processes have left of `name`, and what nobody has opened for long."""
  before = time.time() - 86400 * _KEPT_DAYS
  for path in folder.iterdir():
    if path.suffix == _LOCK:  # whoever waits for one has it open
      continue
    with contextlib.suppress(OSError):
      note = path / _META
      is_left = bool(name) and path.name.startswith(f'{name}.') and path.suffix == _UNFINISHED
      if is_left or (note if note.exists() else path).stat().st_mtime < before:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@contextlib.contextmanager
def _alone(path: pathlib.Path) -> Iterator[Literal['first', 'waited', 'unlocked']]:
  """Lets one process in at a time; yields whether this one waited for others.

  'unlocked': the file system has no locks, so that others may make the same at this time.
  """
  state: Literal['first', 'waited', 'unlocked'] = 'first'
  with path.open('ab') as lock:
    while True:
      try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        break
      except (PermissionError, BlockingIOError):
        if state == 'first':
          log.warning('Waiting for another process that tokenizes the same examples')
        state = 'waited'
        time.sleep(_WAIT_SECONDS)
      except OSError as e:
        log.debug('%s cannot be locked: %s', path, e)
        state = 'unlocked'
        break
    yield state
