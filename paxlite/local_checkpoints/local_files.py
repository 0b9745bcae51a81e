"""Files of local states: the shards of one process of a train state, on a file system of its host.

A file begins with the raw bytes of arrays, one after the other. A description in JSON follows, with
the place and the CRC-32C of each array, the metadata of the checkpoint, and the file's name. The
file ends with a footer, which has the length of the description. A file gets its name when it is
complete, so a process that is killed leaves nothing that looks like a state.
"""

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import pathlib
import re
import struct
from collections.abc import Callable, Iterator, Mapping

import google_crc32c
import numpy as np

from paxlite.core import regular_file
from paxlite.core.errors import UserError, line_of
from paxlite.core.json_text import Json, JsonObject, parsed

Bounds = tuple[tuple[int, int], ...]  # first and last + 1 along each dimension
Key = tuple[str, Bounds]  # the name of a variable, and the part of it

_MAGIC = b'paxlite local state 1\n'
_FOOTER = struct.Struct('<QI')  # length and CRC-32C of the description; _MAGIC comes after it
_BLOCK = 4 << 20  # bytes that are written, or checked, at once
_NAME = re.compile(r'(\d{8,10})_([0-9a-f]{8})_(\d{5,9})\.state', re.ASCII)
_MOST_STEPS = 2**31 - 1  # processes send each other the steps as int32
_UNFINISHED = '.unfinished'


class DamagedError(Exception):
  """A file cannot be read, or its contents have changed."""


@dataclasses.dataclass(frozen=True, order=True)
class Name:
  """The parts of a file's name."""

  step: int  # the step of the state
  branch: str  # the branch of the run that wrote it; see local_checkpoints.branches
  process: int  # number of the process that wrote it

  def __str__(self) -> str:
    return f'{self.step:08d}_{self.branch}_{self.process:05d}.state'


class LocalFolder:
  """The local states of one run on this host.

  Args:
    root: A folder on this host, which the runs of all users may share.
    run: The run's job_log_dir; another path has other states.
  """

  def __init__(self, root: str, run: pathlib.Path):
    self._mine = pathlib.Path(root).absolute() / f'paxlite-{os.getuid()}'
    self.path = self._mine / hashlib.sha256(str(run.absolute()).encode()).hexdigest()[:16]

  def make(self) -> None:
    """Makes the folder, which only its user can read.

    Raises UserError if it cannot be made, or the folder of this user belongs to another one.
    """
    try:
      for path in (self._mine, self.path):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.lstat()
        if found.st_uid != os.getuid() or found.st_mode & 0o077 or path.is_symlink():
          raise UserError(f'{path} is accessible to other users: name another folder')
    except OSError as e:
      raise UserError(f'{e.filename or self.path} cannot be made: {e.strerror or e}') from None

  def names(self) -> list[Name]:
    """Returns the names of the complete files; none if there is no such folder."""
    try:
      found = [_NAME.fullmatch(name) for name in os.listdir(self.path)]
    except OSError:
      return []
    names = [(f[0], Name(int(f[1]), f[2], int(f[3]))) for f in found if f is not None]
    return sorted(name for text, name in names if str(name) == text and name.step <= _MOST_STEPS)

  def size(self) -> int:
    """Returns the bytes of all files."""
    found = 0
    for path in self.path.glob('*'):
      with contextlib.suppress(OSError):
        found += path.stat().st_size
    return found

  def remove(self, is_kept: Callable[[Name], bool]) -> None:
    """Removes all complete files but those to be kept."""
    for name in self.names():
      if not is_kept(name):
        with contextlib.suppress(OSError):
          (self.path / str(name)).unlink()

  def remove_if_empty(self) -> None:
    """Removes the folder, if the run has no files in it any more."""
    with contextlib.suppress(OSError):
      self.path.rmdir()

  def remove_unfinished(self) -> None:
    """Removes what killed processes have left; called while no process of the run writes."""
    for path in self.path.glob(f'*{_UNFINISHED}'):
      with contextlib.suppress(OSError):
        path.unlink()

  def write(
    self,
    name: Name,
    shards: Iterator[tuple[Key, np.ndarray]],
    metadata: Mapping[str, Json],
    commit: Callable[[], bool],
    over: Name | None = None,
  ) -> bool:
    """Writes a file.

    Args:
      shards: The arrays, each with its variable and its part of it.
      metadata: Values to store beside them; they must be valid JSON.
      commit: Called when all bytes are written; the file is kept if it returns True.
      over: A complete file that is no longer needed. Its pages are written over, because new pages
        of a file system in memory cost more than twice the processor time.

    Returns:
      Whether it was kept.

    Raises:
      OSError: It cannot be written. Nothing is left of it.
    """
    path = self.path / str(name)
    unfinished = path.with_name(f'{path.name}{_UNFINISHED}')
    try:
      if over is not None:
        with contextlib.suppress(FileNotFoundError):  # another process has removed it
          (self.path / str(over)).replace(unfinished)
      with unfinished.open('r+b' if unfinished.exists() else 'wb', buffering=0) as f:
        entries = [_written(f, key, array) for key, array in shards]
        held = {'shards': entries, 'notes': dict(metadata), 'name': str(name)}
        description = json.dumps(held).encode()
        _write(f, description)
        footer = _FOOTER.pack(len(description), google_crc32c.value(description))
        _write(f, footer + _MAGIC)
        f.truncate()
      if commit():
        unfinished.replace(path)
        return True
      return False
    finally:
      unfinished.unlink(missing_ok=True)

  def open(self, name: Name) -> 'LocalFile':
    """Returns a file with a description that was read and checked.

    Raises DamagedError if it is damaged, or cannot be read.
    """
    return LocalFile(self.path / str(name))


class LocalFile:
  """A complete file of a local state.

  Attributes:
    metadata: The values that were stored beside the arrays.
  """

  def __init__(self, path: pathlib.Path):
    self._path = path
    with _readable(path), open(path, 'rb', opener=regular_file.no_link) as f:
      end = f.seek(0, os.SEEK_END) - _FOOTER.size - len(_MAGIC)
      f.seek(max(end, 0))
      footer = f.read()
      if end < 0 or footer[_FOOTER.size :] != _MAGIC:
        raise DamagedError(f'{path} is damaged (its end is missing)')
      length, crc = _FOOTER.unpack(footer[: _FOOTER.size])
      f.seek(max(end - length, 0))
      description = f.read(min(length, end))
    if google_crc32c.value(description) != crc:
      raise DamagedError(f'{path} is damaged (the CRC-32C of its description differs)')
    with _readable(path):
      found = parsed(description)
      # after a loss of power, an old file may have the name of the one that was to replace it
      if found.get('name', path.name) != path.name:
        raise DamagedError(f'{path} is damaged (it holds {found["name"]})')
      self.metadata: JsonObject = dict(found['notes'])
      self._entries: dict[Key, JsonObject] = {
        (entry['variable'], tuple(map(tuple, entry['bounds']))): {
          'dtype': np.dtype(entry['dtype']),
          'offset': int(entry['offset']),
          'crc32c': int(entry['crc32c']),
        }
        for entry in found['shards']
      }

  def dtype(self, key: Key) -> np.dtype | None:
    """Returns the dtype of an array; None if the file has no such array."""
    entry = self._entries.get(key)
    return None if entry is None else entry['dtype']

  def read(self, key: Key) -> np.ndarray:
    """Returns an array that the file has.

    Raises DamagedError if it is damaged, or cannot be read.
    """
    entry = self._entries[key]
    array = np.empty([stop - start for start, stop in key[1]], entry['dtype'])
    crc, whole = 0, _bytes(array)
    with _readable(self._path), open(self._path, 'rb', opener=regular_file.no_link) as f:
      f.seek(entry['offset'])
      f.readinto(array.reshape(-1).view(np.uint8).data)
      for start in range(0, len(whole), _BLOCK):
        crc = google_crc32c.extend(crc, whole[start : start + _BLOCK])
    if crc != entry['crc32c']:
      raise DamagedError(f'{self._path} is damaged (the CRC-32C of {key[0]} differs)')
    return array


def _written(f: io.FileIO, key: Key, array: np.ndarray) -> JsonObject:
  """Writes an array; returns its entry in the description."""
  offset, crc = f.tell(), 0
  whole = _bytes(np.ascontiguousarray(array))
  for start in range(0, len(whole), _BLOCK):
    block = whole[start : start + _BLOCK]
    crc = google_crc32c.extend(crc, block)
    _write(f, block.data)
  variable, bounds = key
  return {
    'variable': variable, 'bounds': bounds, 'dtype': array.dtype.name, 'offset': offset,
    'crc32c': crc,
  }  # fmt: skip


def _bytes(array: np.ndarray) -> np.ndarray:
  """Returns the bytes of a contiguous array [n], which cannot be written through it."""
  found = array.reshape(-1).view(np.uint8)
  found.flags.writeable = False
  return found


def _write(f: io.FileIO, block: bytes | memoryview) -> None:
  while len(block):  # a full disk may accept a part
    block = block[f.write(block) :]


@contextlib.contextmanager
def _readable(path: pathlib.Path) -> Iterator[None]:
  """A context in which an error of reading, or of what was read, is a DamagedError."""
  try:
    yield
  except OSError as e:
    raise DamagedError(f'{path} cannot be read: {e.strerror or e}') from None
  except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as e:
    raise DamagedError(f'{path} is damaged ({line_of(e)})') from None
