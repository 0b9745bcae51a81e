"""Detects damaged checkpoints by the sizes and CRC-32 sums of their files, and by their step.

A checkpoint counts as damaged only if its bytes were read and are wrong. A checkpoint that cannot
be read may be good: a disk, a server or a permission must be repaired before it can be judged.
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
from collections.abc import Iterable, Iterator, Mapping

from paxlite.core import regular_file
from paxlite.core.errors import UnreadableError, UserError, naming
from paxlite.core.json_text import JsonObject, parsed

Sum = tuple[int, int]  # the size and the CRC-32 of a file

PREFIX = 'checkpoint'
CHECKSUMS = 'checksums.json'
ITEMS = ('state', 'data')
_METADATA = 'data/metadata'
_READERS = 8  # threads that read files to check them
# errors that mean that a file is absent, not that it could not be read
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)


class _ChecksumError(Exception):
  """The bytes that were read differ from the bytes that were saved."""


def step_of(name: str) -> int | None:
  """Returns the step in a folder's name, or None if it is not the name of a checkpoint."""
  found = re.fullmatch(rf'{PREFIX}_(\d{{8,18}})', name, re.ASCII)
  step = None if found is None else int(found[1])
  return step if step is not None and name == folder_name(step) else None


def folder_name(step: int) -> str:
  return f'{PREFIX}_{step:08d}'


def write_checksums(folder: pathlib.Path, known: Mapping[str, Sum] | None = None) -> None:
  """Writes checksums.json, the size and CRC-32 of every file of a step, into its folder.

  Args:
    folder: The folder of the step.
    known: Those of files that have just been written, by their path in the folder; all others are
      read.
  """
  found, known = _files(folder), known or {}
  read = _checksums(folder, [name for name in found if name not in known])
  sums = read | dict(known)
  (folder / CHECKSUMS).write_text(json.dumps({name: sums[name] for name in found}))


def fingerprint(folder: pathlib.Path) -> int | None:
  """Returns a CRC-32 of a checkpoint's checksums.json, or None if there is no such file.

  Raises UserError if the file cannot be read.
  """
  try:
    return zlib.crc32(_read(folder / CHECKSUMS))
  except _ChecksumError:
    return None
  except OSError as e:
    if e.errno in _ABSENT:
      return None
    raise unreadable(folder, e) from None


def damage(folder: pathlib.Path, up_to: float = math.inf) -> str | None:
  """Returns what is wrong with a checkpoint, or None; above `up_to` bytes only sizes are checked.

  Raises UserError if the checkpoint cannot be read, so it is not known whether it is damaged.
  """
  try:
    _check_files(folder, up_to)
    _check_step(folder)
  except _ChecksumError as e:
    return str(e)
  except OSError as e:
    if e.errno not in _ABSENT:
      raise unreadable(folder, e) from None
    missing = pathlib.Path(e.filename or folder)
    name = missing.relative_to(folder) if missing.is_relative_to(folder) else missing
    return f'{name} is missing'
  return None


def check_metadata(folder: pathlib.Path) -> None:
  """Raises UserError if something in a folder of checkpoints would block Orbax, as a FIFO does.

  Orbax reads its metadata of every step, which has no checksums.
  """
  try:
    steps = [path for path in folder.iterdir() if step_of(path.name) is not None]
    for place in (folder, folder / 'metadata', *steps):
      for entry in place.iterdir() if place.is_dir() else ():
        if entry.exists() and not (entry.is_file() or entry.is_dir()):
          raise UserError(f'{entry} is not a file: move it elsewhere')
  except OSError as e:
    raise unreadable(folder, e) from None


def unreadable(path: str | os.PathLike, error: OSError) -> UserError:
  """Returns the error to raise if something at `path` could not be read."""
  return UnreadableError(f'{error.filename or path} cannot be read: {error.strerror or error}')


def _check_files(folder: pathlib.Path, up_to: float) -> None:
  expected = _expected(folder)
  present = set(_files(folder))
  for name in sorted(present ^ expected.keys()):
    raise _ChecksumError(
      f'{name} is missing' if name in expected else f'{name} is not in {CHECKSUMS}'
    )
  sizes = {name: (folder / name).stat().st_size for name in expected}
  actual = _checksums(folder, [name for name in expected if sizes[name] <= up_to])
  for name in expected:
    if sizes[name] != expected[name][0] or actual.get(name, expected[name]) != expected[name]:
      raise _ChecksumError(f'{name} is damaged (size or CRC-32 differs)')


def _expected(folder: pathlib.Path) -> dict[str, Sum]:
  found = _json(folder, CHECKSUMS)
  for entry in found.values():
    if not (isinstance(entry, list) and [type(x) for x in entry] == [int, int]):
      raise _ChecksumError(f'{CHECKSUMS} is damaged (a file lacks its size or CRC-32)')
  return {name: (size, crc) for name, (size, crc) in found.items()}


def _check_step(folder: pathlib.Path) -> None:
  """Raises _ChecksumError unless a folder is named after the step that it holds."""
  step = step_of(folder.name)
  if step is None or not _is_file(folder / _METADATA):  # Weights without a run have no metadata.
    return
  inside = _json(folder, _METADATA).get('step', step)
  if type(inside) is not int:
    raise _ChecksumError(f'{_METADATA} is damaged (its step is not a number)')
  if inside != step:
    raise _ChecksumError(f'it is of step {inside}, as {_METADATA} says')


def _json(folder: pathlib.Path, name: str) -> JsonObject:
  data = _read(folder / name)
  try:
    found = parsed(data)
  except ValueError as e:
    raise _ChecksumError(f'{name} is damaged ({e})') from None
  if not isinstance(found, dict):
    raise _ChecksumError(f'{name} is damaged (it does not hold a JSON object)')
  return found


def _read(path: pathlib.Path) -> bytes:
  if not stat.S_ISREG(path.stat().st_mode):  # Reading a FIFO would block.
    raise _ChecksumError(f'{path.name} is not a file')
  with naming(path):
    return path.read_bytes()


def _files(folder: pathlib.Path) -> list[str]:
  """Returns the files of a step's items, and experiment.json, which imported weights have.

  Other files are left out: Orbax writes its own metadata next to them until the commit.
  """
  found = [path for item in ITEMS for path in _below(folder / item)]
  found.append(folder / 'experiment.json')
  return sorted(p.relative_to(folder).as_posix() for p in found if _is_file(p))


def _is_file(path: pathlib.Path) -> bool:
  """Path.is_file(), but it raises errors of reading; newer Pythons return False on any error."""
  try:
    return stat.S_ISREG(path.stat().st_mode)
  except OSError as e:
    if e.errno not in _ABSENT:
      raise
    return False


def _below(folder: pathlib.Path) -> Iterator[pathlib.Path]:
  """Yields all files below a folder; pathlib would skip subfolders that it cannot read."""

  def fail(error: OSError) -> None:
    if error.errno not in _ABSENT:
      raise error

  for parent, _, names in os.walk(folder, onerror=fail):
    yield from (pathlib.Path(parent, name) for name in names)


def checksum(path: pathlib.Path) -> Sum:
  """Returns the size and the CRC-32 of a file."""
  size = crc = 0
  block = memoryview(bytearray(1 << 20))
  with naming(path), open(path, 'rb', buffering=0, opener=regular_file.opener) as f:
    while n := f.readinto(block):
      size += n
      crc = zlib.crc32(block[:n], crc)
  return size, crc


def _checksums(folder: pathlib.Path, names: Iterable[str]) -> dict[str, Sum]:
  """Returns size and CRC-32 by name; several files are read in parallel, which is faster."""
  names = list(names)
  with concurrent.futures.ThreadPoolExecutor(_READERS) as pool:
    return dict(zip(names, pool.map(lambda n: checksum(folder / n), names), strict=True))
