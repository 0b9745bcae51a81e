"""Detects checkpoints that are not as they were saved, by sizes and CRC-32 sums, and their step.

Only what was read and is wrong is damaged. What cannot be read may be whole: a disk, a server or a
permission has to be mended, and nothing is said of the checkpoint until then.
"""

import concurrent.futures
import errno
import json
import math
import os
import pathlib
import re
import stat
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

from paxlite.core.errors import UnreadableError, UserError, naming

PREFIX = 'checkpoint'
CHECKSUMS = 'checksums.json'
ITEMS = ('state', 'data')
_NOTES = 'data/metadata'
_READERS = 8  # threads that read files to check them
# errors that say what is there, and not that it could not be read
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)


class _DamagedError(Exception):
  """The bytes that were read are not the bytes that were saved."""


def step_of(name: str) -> int | None:
  """The step that a folder's name says it is of; None where it is no name of a checkpoint."""
  found = re.fullmatch(rf'{PREFIX}_(\d{{8,18}})', name, re.ASCII)
  step = None if found is None else int(found[1])
  return step if step is not None and name == folder_name(step) else None


def folder_name(step: int) -> str:
  return f'{PREFIX}_{step:08d}'


def write_checksums(folder: pathlib.Path) -> None:
  """Writes size and CRC-32 of every file of a complete step into the step."""
  (folder / CHECKSUMS).write_text(json.dumps(_checksums(folder, _files(folder))))


def fingerprint(folder: pathlib.Path) -> int | None:
  """Of a checkpoint's bytes, by their checksums; None where there are none.

  Raises:
    UserError: they cannot be read.
  """
  try:
    return zlib.crc32(_read(folder / CHECKSUMS))
  except _DamagedError:
    return None
  except OSError as e:
    if e.errno in _ABSENT:
      return None
    raise unreadable(folder, e) from None


def damage(folder: pathlib.Path, up_to: float = math.inf) -> str | None:
  """What is wrong with a checkpoint, or None; of files above `up_to` bytes, only with their sizes.

  Raises:
    UserError: it cannot be read, so that nobody can say.
  """
  try:
    _check_files(folder, up_to)
    _check_step(folder)
  except _DamagedError as e:
    return str(e)
  except OSError as e:
    if e.errno not in _ABSENT:
      raise unreadable(folder, e) from None
    missing = pathlib.Path(e.filename or folder)
    name = missing.relative_to(folder) if missing.is_relative_to(folder) else missing
    return f'{name} is missing'
  return None


def unreadable(path: str | os.PathLike, error: OSError) -> UserError:
  """The error to raise where something at `path` could not be read."""
  return UnreadableError(f'{error.filename or path} cannot be read: {error.strerror or error}')


def _check_files(folder: pathlib.Path, up_to: float) -> None:
  expected = _expected(folder)
  present = set(_files(folder))
  for name in sorted(present ^ expected.keys()):
    raise _DamagedError(
      f'{name} is missing' if name in expected else f'{name} is not in {CHECKSUMS}'
    )
  sizes = {name: (folder / name).stat().st_size for name in expected}
  actual = _checksums(folder, [name for name in expected if sizes[name] <= up_to])
  for name in expected:
    if sizes[name] != expected[name][0] or actual.get(name, expected[name]) != expected[name]:
      raise _DamagedError(f'{name} is damaged (size or CRC-32 differs)')


def _expected(folder: pathlib.Path) -> dict[str, tuple[int, int]]:
  found = _json(folder, CHECKSUMS)
  for entry in found.values():
    if not (isinstance(entry, list) and [type(x) for x in entry] == [int, int]):
      raise _DamagedError(f'{CHECKSUMS} is damaged (a file has no size and CRC-32)')
  return {name: (size, crc) for name, (size, crc) in found.items()}


def _check_step(folder: pathlib.Path) -> None:
  """Whether a folder is named after the step that it holds."""
  step = step_of(folder.name)
  if step is None or not _is_file(folder / _NOTES):  # which weights alone do not have
    return
  inside = _json(folder, _NOTES).get('step', step)
  if type(inside) is not int:
    raise _DamagedError(f'{_NOTES} is damaged (its step is no number)')
  if inside != step:
    raise _DamagedError(f'it is of step {inside}, as {_NOTES} says')


def _json(folder: pathlib.Path, name: str) -> dict[str, Any]:
  data = _read(folder / name)
  try:
    found = json.loads(data)
  except (ValueError, RecursionError) as e:
    raise _DamagedError(f'{name} is damaged ({e})') from None
  if not isinstance(found, dict):
    raise _DamagedError(f'{name} is damaged (it holds no JSON object)')
  return found


def _read(path: pathlib.Path) -> bytes:
  if not stat.S_ISREG(path.stat().st_mode):  # a FIFO would be waited for
    raise _DamagedError(f'{path.name} is not a file')
  with naming(path):
    return path.read_bytes()


def _files(folder: pathlib.Path) -> list[str]:
  """The files of a step's items, and the file that names the model of imported weights.

  Orbax adds its own notes to them until the commit.
  """
  found = [path for item in ITEMS for path in _below(folder / item)]
  found.append(folder / 'experiment.json')
  return sorted(p.relative_to(folder).as_posix() for p in found if _is_file(p))


def _is_file(path: pathlib.Path) -> bool:
  """Path.is_file(), but that an error of reading is one; newer Pythons take any for False."""
  try:
    return stat.S_ISREG(path.stat().st_mode)
  except OSError as e:
    if e.errno not in _ABSENT:
      raise
    return False


def _below(folder: pathlib.Path) -> Iterator[pathlib.Path]:
  """The files of a folder. pathlib would leave out those that it cannot read."""

  def fail(error: OSError) -> None:
    if error.errno not in _ABSENT:
      raise error

  for parent, _, names in os.walk(folder, onerror=fail):
    yield from (pathlib.Path(parent, name) for name in names)


def _checksum(path: pathlib.Path) -> tuple[int, int]:
  size = crc = 0
  block = memoryview(bytearray(1 << 20))
  with naming(path), path.open('rb', buffering=0) as f:
    while n := f.readinto(block):
      size += n
      crc = zlib.crc32(block[:n], crc)
  return size, crc


def _checksums(folder: pathlib.Path, names: Iterable[str]) -> dict[str, tuple[int, int]]:
  """Size and CRC-32 by name; disks read several files at a time faster than one."""
  names = list(names)
  with concurrent.futures.ThreadPoolExecutor(_READERS) as pool:
    return dict(zip(names, pool.map(lambda n: _checksum(folder / n), names), strict=True))
