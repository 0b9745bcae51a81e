"""Copies the files of a run's folder to an object store, and back.

Stores cannot append to an object, and take about one write a second for each of them. So a file is
cut into pieces of 8 MiB: the first is an object with the file's own name, the others have
.piece00001 and so on after it. Only pieces that have changed are written, and one piece is in
memory at a time. Checkpoints are not copied here.
"""

import concurrent.futures
import contextlib
import json
import os
import pathlib
import re
import zlib
from collections.abc import Iterator

from paxlite.core.addresses import Address
from paxlite.core.json_text import parsed
from paxlite.core.object_store import ObjectStore
from paxlite.core.run_files import write_file

CHECKPOINTS = 'checkpoints'  # folders of this name are left out, in the run's folder and below
_PIECE = 8 << 20
_NOTES = '.mirrored.json'
_PIECE_NAME = re.compile(r'(.+)\.piece(\d{5})')
_READERS = 8
_OTHERS = {'lease.json'}  # objects that are no files of the run


class Mirror:
  """Copies files between a folder and the objects below an address.

  Args:
    store: The bucket of the address.
    address: The run's job_log_dir.
    folder: The folder on this machine.
  """

  def __init__(self, store: ObjectStore, address: Address, folder: pathlib.Path):
    self._store = store
    self._address = address
    self._folder = folder
    self._pieces: dict[str, list[int]] = {}  # the CRC-32 of each piece that is in the store
    self._changed: dict[str, tuple[int, int]] = {}  # size and time of change of each file

  def resume(self) -> None:
    """Keeps the files of the last run, which was in this folder, and gets those that are absent.

    Raises as `upload` does.
    """
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
      found = parsed((self._folder / _NOTES).read_text())
      self._pieces = {str(k): list(map(int, v)) for k, v in found.items()}
    self._download_all({name for name, _ in self._files()})

  def upload(self) -> None:
    """Copies the files that have changed to the store, and deletes the objects of absent ones.

    Raises:
      OSError: The store does not answer.
      StoreError: The bucket cannot be used.
    """
    files = dict(self._files())
    try:
      for name in [name for name in self._pieces if name not in files]:
        self._delete(name, 0)
      for name, stamp in files.items():
        if self._changed.get(name) != stamp:
          self._upload(name)
          self._changed[name] = stamp
    finally:
      with contextlib.suppress(OSError):  # A full disk is reported where checkpoints are written.
        write_file(self._folder / _NOTES, json.dumps(self._pieces).encode())

  def download(self) -> None:
    """Replaces the files in the folder by those in the store; raises as `upload` does."""
    for name, _ in list(self._files()):
      (self._folder / name).unlink()
    self._pieces = {}
    self._download_all(set())

  def _download_all(self, present: set[str]) -> None:
    """Gets the files that are not present."""
    pieces: dict[str, list[tuple[int, str]]] = {}
    for found in self._store.below(self._address.key):
      name = found.key.removeprefix(self._address.key).lstrip('/')
      if name in _OTHERS or CHECKPOINTS in name.split('/') or name.rpartition('/')[2][0] == '.':
        continue
      split = _PIECE_NAME.fullmatch(name)
      whole, number = (split[1], int(split[2])) if split else (name, 0)
      if whole in present:
        continue
      pieces.setdefault(whole, []).append((number, found.key))
    with concurrent.futures.ThreadPoolExecutor(_READERS) as pool:
      for name, crcs in zip(pieces, pool.map(self._download, pieces.items()), strict=True):
        self._pieces[name] = crcs

  def _download(self, file: tuple[str, list[tuple[int, str]]]) -> list[int]:
    name, pieces = file
    path = self._folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f'{path.name}.tmp')
    crcs = []
    with unfinished.open('wb') as f:
      for expected, (number, key) in enumerate(sorted(pieces)):
        if number != expected:
          break  # A piece is missing: the file ends before it.
        data = self._store.read(key)
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
            self._store.write(self._key(name, number), data)
            known[number:] = [crc, *known[number + 1 :]]
    except FileNotFoundError:
      return  # It was renamed in the meantime.

  def _delete(self, name: str, kept: int) -> None:
    """Deletes the pieces of a file from number `kept` on, the last one first."""
    known = self._pieces[name]
    while len(known) > kept:
      self._store.delete([self._key(name, len(known) - 1)])
      known.pop()
    if not kept:
      del self._pieces[name]

  def _key(self, name: str, number: int) -> str:
    return (self._address / (f'{name}.piece{number:05d}' if number else name)).key

  def _files(self) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yields the names of the files to copy, with their sizes and times of change."""
    for parent, folders, names in os.walk(self._folder):
      folders[:] = [f for f in folders if f != CHECKPOINTS and not f.startswith('.')]
      for name in names:
        path = pathlib.Path(parent, name)
        if name.startswith('.') or name.endswith('.tmp') or path.is_symlink():
          continue
        with contextlib.suppress(OSError):
          stat = path.stat()
          yield path.relative_to(self._folder).as_posix(), (stat.st_size, stat.st_mtime_ns)
