"""Checksums of large files, computed only once per file.

A file that was found good is remembered by its path, size, inode and modification time, in the
user's folder paxlite/checked in XDG_CACHE_HOME or ~/.cache. A file that has been written since is
read again.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import pathlib
import time
from collections.abc import Iterator

import google_crc32c

from paxlite.core.errors import UserError, naming
from paxlite.core.json_text import parsed

log = logging.getLogger('paxlite')

_READ_BYTES = 1 << 22
_SECONDS_BETWEEN_LINES = 5.0
_KEPT_DAYS = 90  # for which a file is remembered as good


def check(path: pathlib.Path, crc32c: int) -> None:
  """Compares a file with its checksum, unless that was done before.

  Other processes that check the file wait for the first one. Raises UserError if the file is
  damaged: it has another checksum.
  """
  note = _note(path)
  if _is_remembered(path, crc32c, note):
    return
  with _alone(note):
    if _is_remembered(path, crc32c, note):  # another process has checked it meanwhile
      return
    before = _identity(path, crc32c)
    found = _crc32c_of(path)
    if found != crc32c:
      raise UserError(
        f'{path} is damaged: its CRC-32C is {found:08x} and {path.parent / "meta.json"} says '
        f'{crc32c:08x}. Copy it again, or tokenize again'
      )
    _remember(note, before)


def crc32c_of(path: pathlib.Path) -> int:
  """Returns the checksum of a file, which is read only if it was written since the last time."""
  note = _note(path)
  with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
    known = parsed(note.read_bytes())['crc32c'] if note is not None else None
    if known is not None and _is_remembered(path, known, note):
      return int(known)
  before = _identity(path, 0)
  found = _crc32c_of(path)
  _remember(note, before | {'crc32c': found})
  return found


def remember(path: pathlib.Path, crc32c: int) -> None:
  """Remembers a file as good; for callers that have just written the file and read it back."""
  _remember(_note(path), _identity(path, crc32c))


def _identity(path: pathlib.Path, crc32c: int) -> dict[str, str | int]:
  status = path.stat()
  return {
    'path': os.path.realpath(path),
    'size': status.st_size,
    'mtime_ns': status.st_mtime_ns,
    'ctime_ns': status.st_ctime_ns,  # touch and rsync can restore the other time
    'inode': status.st_ino,
    'crc32c': crc32c,
  }


def _note(path: pathlib.Path) -> pathlib.Path | None:
  """Returns the path of the note that a file is good; None if there is no home folder."""
  try:
    base = os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache'
  except RuntimeError:
    return None
  name = hashlib.sha256(os.fsencode(os.path.realpath(path))).hexdigest()[:32]
  return pathlib.Path(base) / 'paxlite' / 'checked' / f'{name}.json'


def _is_remembered(path: pathlib.Path, crc32c: int, note: pathlib.Path | None) -> bool:
  try:
    return note is not None and parsed(note.read_bytes()) == _identity(path, crc32c)
  except (OSError, ValueError):
    return False


def _remember(note: pathlib.Path | None, identity: dict[str, str | int]) -> None:
  if note is None:
    return
  try:
    note.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    unfinished = note.with_suffix(f'.{os.getpid()}.tmp')
    unfinished.write_text(json.dumps(identity) + '\n')
    unfinished.replace(note)
    for old in note.parent.iterdir():
      if old.stat().st_mtime < time.time() - 86400 * _KEPT_DAYS:
        old.unlink()
  except OSError as e:  # the home is read-only or full: the next start reads the file again
    log.debug('%s cannot be written: %s', note, e)


@contextlib.contextmanager
def _alone(note: pathlib.Path | None) -> Iterator[None]:
  """Makes processes that share a home folder check a file one at a time.

  If the file cannot be locked, each process checks it.
  """
  with contextlib.ExitStack() as stack:
    if note is not None:
      with contextlib.suppress(OSError):
        note.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = stack.enter_context(note.with_suffix('.lock').open('ab'))
        fcntl.flock(lock, fcntl.LOCK_EX)
    yield


def _crc32c_of(path: pathlib.Path) -> int:
  """Returns the CRC-32C of a file, and logs its progress every few seconds."""
  crc = done = 0
  said = time.monotonic()
  with naming(path), path.open('rb', buffering=0) as f:
    size = os.fstat(f.fileno()).st_size
    while data := f.read(_READ_BYTES):
      crc = google_crc32c.extend(crc, data)
      done += len(data)
      if time.monotonic() > said + _SECONDS_BETWEEN_LINES:
        said = time.monotonic()
        log.warning('Checking %s, once: %.1f of %.1f GB', path, done / 1e9, size / 1e9)
  return crc
