"""The bytes of files that are read in any order."""

import os
import pathlib
import threading
from collections.abc import Iterable
from typing import IO, Protocol

from paxlite.core.errors import UserError, naming


class Content(Protocol):
  """The bytes of a file, which can be read in any order, by several threads."""

  size: int  # bytes of the file
  read_ahead: int  # how many batches of rows should be requested before they are read

  def read(self, offset: int, length: int) -> bytes | bytearray:
    """Returns `length` bytes from `offset` on; fewer at the end. Raises UserError."""

  def will_read(self, parts: Iterable[tuple[int, int]]) -> None:
    """Begins to fetch parts, (offset, length) each, that will be read soon."""


class FileContent:
  """The content of a file on this machine, which stays open."""

  read_ahead = 0  # the kernel reads ahead

  def __init__(self, path: pathlib.Path):
    self._path = path
    self._file = path.open('rb', buffering=0)  # closed when this object is deleted
    self._descriptor = self._file.fileno()
    self.size = os.fstat(self._descriptor).st_size

  def read(self, offset: int, length: int) -> bytearray:
    data = bytearray(max(0, min(length, self.size - offset)))
    left = memoryview(data)
    while left:  # the kernel reads at most 2 GiB at once
      with naming(self._path):
        count = os.preadv(self._descriptor, [left], offset)
      if not count:
        size = os.fstat(self._descriptor).st_size
        raise UserError(
          f'{self._path} has {size:,} bytes but had {self.size:,} when opened: it changed while '
          'the run read it. Put it back and start the run again'
        )
      left, offset = left[count:], offset + count
    return data

  def will_read(self, parts: Iterable[tuple[int, int]]) -> None:
    pass


class OpenedContent:
  """The content of an open file that can seek."""

  read_ahead = 0

  def __init__(self, file: IO[bytes]):
    self._file, self._lock = file, threading.Lock()
    self.size = file.seek(0, os.SEEK_END)

  def read(self, offset: int, length: int) -> bytes:
    with self._lock:
      self._file.seek(offset)
      return self._file.read(length)

  def will_read(self, parts: Iterable[tuple[int, int]]) -> None:
    pass
