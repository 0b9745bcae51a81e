"""Copies the files of a run's folder to an object store, and back.

Stores cannot append to an object, and take about one write a second for each of them. So a file is
cut into pieces of 8 MiB: the first is an object with the file's own name, the others have
.piece00001 and so on after it. Only pieces that have changed are written, and one piece is in
memory at a time. Checkpoints are not copied here.
"""

import concurrent.futures
import contextlib
import errno
import json
import os
import pathlib
import zlib
from collections.abc import Iterator

from paxlite.core.json_text import parsed
from paxlite.core.run_files import write_file
from paxlite.stores.object_store import Object, ObjectStore
from paxlite.stores.stored_files import files_below, is_piece, piece_name

CHECKPOINTS = 'checkpoints'  # folders of this name are left out, in the run's folder and below
_PIECE = 8 << 20
_CHECKSUMS = '.mirrored.json'
_READERS = 8
_LEASE = 'lease.json'  # is no file of the run


class Mirror:
  """Copies files between a folder and a store.

  Args:
    store: The store of the run's job_log_dir.
    folder: The folder on this machine.
    known: The name of an object that is there when files are copied to the folder. A list without
      it is not believed.
  """

  def __init__(self, store: ObjectStore, folder: pathlib.Path, known: str | None = None):
    self._store = store
    self._folder = folder
    self._known = known
    self._pieces: dict[str, list[int]] = {}  # the CRC-32 of each piece that is in the store
    self._tags: dict[str, str] = {}  # of the objects that this process has written
    self._changed: dict[str, tuple[int, int]] = {}  # size and time of change of each file

  def upload(self) -> None:
    """Copies the files that have changed to the store, and deletes the objects of absent ones."""
    files = dict(self._files())
    if self._pieces and not files:  # a run always has files, so something else removed them
      reason = 'its files are gone; none is deleted in the store'
      raise FileNotFoundError(errno.ENOENT, reason, str(self._folder))
    try:
      for name in [name for name in self._pieces if name not in files]:
        self._delete(name, 0)
      for name, stamp in files.items():
        if self._changed.get(name) != stamp:
          self._upload(name)
          self._changed[name] = stamp
    finally:
      with contextlib.suppress(OSError):  # A full disk is reported where checkpoints are written.
        write_file(self._folder / _CHECKSUMS, json.dumps(self._pieces).encode())

  def download(self, resumes: bool = False) -> None:
    """Replaces the files in the folder by those in the store.

    Args:
      resumes: Whether the last run was in this folder: then its files are kept, and only those that
        are absent come from the store.
    """
    self._pieces = {}
    if resumes:
      with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        found = parsed((self._folder / _CHECKSUMS).read_text())
        self._pieces = {str(k): list(map(int, v)) for k, v in found.items()}
    else:
      for name, _ in list(self._files()):
        (self._folder / name).unlink()
    present = {name for name, _ in self._files()}
    below = files_below(self._store, known=self._known)
    files = {k: v for k, v in below.items() if k not in present and _is_of_mirror(k)}
    with concurrent.futures.ThreadPoolExecutor(_READERS) as pool:
      for name, crcs in zip(files, pool.map(self._download, files.items()), strict=True):
        self._pieces[name] = crcs

  def _download(self, file: tuple[str, list[Object]]) -> list[int]:
    name, objects = file
    path = self._folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f'{path.name}.tmp')
    crcs = []
    with unfinished.open('wb') as f:
      for found in objects:
        data = self._store.read(found.name, found.size)
        crcs.append(zlib.crc32(data))
        f.write(data)
    unfinished.replace(path)
    return crcs

  def _upload(self, name: str) -> None:
    path = self._folder / name
    known = self._pieces.setdefault(name, [])
    try:
      with path.open('rb') as f:
        count = max(1, -(-os.fstat(f.fileno()).st_size // _PIECE))
        self._delete(name, count)
        for number in range(count):
          data = f.read(_PIECE)
          crc = zlib.crc32(data)
          if number >= len(known) or known[number] != crc:
            key = piece_name(name, number)
            self._tags[key] = self._store.write_own(key, data, self._tags.get(key))
            known[number:] = [crc, *known[number + 1 :]]
    except FileNotFoundError:
      return  # It was renamed in the meantime.

  def _delete(self, name: str, kept: int) -> None:
    """Deletes the pieces of a file from number `kept` on, the last one first."""
    known = self._pieces[name]
    while len(known) > kept:
      key = piece_name(name, len(known) - 1)
      self._store.delete([key])
      self._tags.pop(key, None)
      known.pop()
    if not kept:
      del self._pieces[name]

  def _files(self) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yields the names of the files to copy, with their sizes and times of change."""
    for parent, folders, names in os.walk(self._folder, onerror=_raise_unless_absent):
      folders[:] = [f for f in folders if f != CHECKPOINTS and not f.startswith('.')]
      for name in names:
        path = pathlib.Path(parent, name)
        if name.startswith('.') or name.endswith('.tmp') or path.is_symlink():
          continue
        with contextlib.suppress(OSError):
          stat = path.stat()
          yield path.relative_to(self._folder).as_posix(), (stat.st_size, stat.st_mtime_ns)


def _raise_unless_absent(error: OSError) -> None:
  """Raises the error of a folder that cannot be read, so that its files do not count as gone."""
  if not isinstance(error, FileNotFoundError):
    raise error


def _is_of_mirror(name: str) -> bool:
  """Returns whether the file of a run is one that `upload` copies."""
  *folders, last = name.split('/')
  return not (name == _LEASE or CHECKPOINTS in folders or last[:1] == '.' or is_piece(name))
