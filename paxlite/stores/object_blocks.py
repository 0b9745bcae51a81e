"""Partial reads of objects, in blocks that are cached on disk and fetched several at a time.

The cache is in paxlite/objects/blocks in XDG_CACHE_HOME or ~/.cache. It takes at most
PAXLITE_CACHE_GB (100). If it is full, the blocks that were fetched first are removed. Blocks of an
object that has changed have other names, so they are never mixed.
"""

import concurrent.futures
import contextlib
import errno
import functools
import hashlib
import io
import os
import pathlib
import threading
import uuid
from collections.abc import Iterable
from typing import IO, TYPE_CHECKING

from paxlite.core.errors import AbsentError
from paxlite.files.schemes import cache
from paxlite.stores.object_copies import most_bytes
from paxlite.stores.object_store import ObjectStore
from paxlite.stores.store_errors import reading

if TYPE_CHECKING:
  from _typeshed import WriteableBuffer

IN_ORDER = 4 << 20  # bytes of a block of a file that is read from its beginning to its end
AT_RANDOM = 1 << 18  # bytes of a block of a file whose short parts are read in any order
_AHEAD = 4  # blocks that are read ahead of a file that is read in order
_AT_ONCE = 32
_RANGE = 16 << 20  # bytes of a request of what is not kept
_RANGES_AT_ONCE = 8
_IN_MEMORY = 16 << 20  # bytes of the blocks of one object
_lock = threading.Lock()
_used: list[int] = []  # the bytes of all blocks on the disk, once they are counted
_pool = concurrent.futures.ThreadPoolExecutor(_AT_ONCE, thread_name_prefix='objects')


class ObjectRanges:
  """The uncached Content of an object, for reading it once."""

  read_ahead = 0

  def __init__(self, address: str):
    self.address = address
    with reading(address):
      self._store = ObjectStore(address)
      try:
        found = self._store.head('')
      except FileNotFoundError:
        raise AbsentError(f'{address} does not exist') from None
    self.size, self._tag = found.size, found.tag

  def read(self, offset: int, length: int) -> bytes | bytearray:
    data = bytearray(max(0, min(length, self.size - offset)))

    def get(at: int) -> None:
      part = min(_RANGE, len(data) - at)
      data[at : at + part] = self._range(offset + at, part)

    with concurrent.futures.ThreadPoolExecutor(_RANGES_AT_ONCE) as pool:
      list(pool.map(get, range(0, len(data), _RANGE)))
    return data

  def will_read(self, parts: Iterable[tuple[int, int]]) -> None:
    pass

  def _range(self, offset: int, length: int) -> bytes:
    """Returns the bytes of one request."""
    with reading(self.address):
      data = self._store.read_range('', offset, offset + length, self._tag)
      if len(data) != length:
        raise OSError(errno.EIO, f'the store sent {len(data):,} of {length:,} bytes')
      return data


class ObjectBytes(ObjectRanges):
  """The cached Content of an object; a request reads `block` bytes."""

  read_ahead = 16

  def __init__(self, address: str, block: int = AT_RANDOM):
    super().__init__(address)
    self._block = block
    version = hashlib.sha256(f'{address} {self._tag} {self.size} {block}'.encode()).hexdigest()
    self._folder = cache() / 'blocks' / version[:24]
    self._lock = threading.Lock()
    self._coming: dict[int, concurrent.futures.Future] = {}
    self._get = functools.lru_cache(_IN_MEMORY // block)(self._fetched)

  def read(self, offset: int, length: int) -> bytes:
    numbers = self._numbers(offset, length)
    if len(numbers) > 1:
      self._fetch(numbers)
    start = offset - numbers.start * self._block
    return b''.join(map(self._get, numbers))[start : start + length]

  def will_read(self, parts: Iterable[tuple[int, int]]) -> None:
    self._fetch(number for part in parts for number in self._numbers(*part))

  def _numbers(self, offset: int, length: int) -> range:
    last = (min(offset + length, self.size) - 1) // self._block
    return range(offset // self._block, last + 1)

  def _fetch(self, numbers: Iterable[int]) -> None:
    """Begins to fetch blocks onto the disk; they are not kept in memory."""
    with self._lock:
      for number in numbers:
        if number not in self._coming:
          self._coming[number] = _pool.submit(self._bring, number)

  def _bring(self, number: int) -> None:
    try:
      if not self._path(number).exists():
        self._load(number)
    finally:
      with self._lock:
        del self._coming[number]

  def _fetched(self, number: int) -> bytes:
    with self._lock:
      coming = self._coming.get(number)
    if coming is not None:
      coming.result()
    return self._load(number)

  def _path(self, number: int) -> pathlib.Path:
    return self._folder / f'{number // 1000:06d}' / f'{number:09d}'

  def _load(self, number: int) -> bytes:
    """Returns a block from the disk, or else from the store."""
    path = self._path(number)
    start = number * self._block
    length = min(self._block, self.size - start)
    with contextlib.suppress(OSError):
      data = path.read_bytes()
      if len(data) == length:
        return data
    data = self._range(start, length)
    _keep(path, data)
    return data


def open_object(address: str) -> IO[bytes]:
  """Opens an object to be read from its beginning to its end; parts of it are read ahead."""
  return io.BufferedReader(_InOrder(ObjectBytes(address, IN_ORDER)), 1 << 20)


class _InOrder(io.RawIOBase):
  """A file of the bytes of an object, which fetches the next blocks before they are read."""

  def __init__(self, content: ObjectBytes):
    self._content = content
    self._at = 0

  def readable(self) -> bool:
    return True

  def seekable(self) -> bool:
    return True

  def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
    start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._content.size}[whence]
    self._at = max(0, start + offset)
    return self._at

  def readinto(self, buffer: 'WriteableBuffer') -> int:
    view = memoryview(buffer)
    end = min(self._at + (_AHEAD + 1) * IN_ORDER, self._content.size)
    if IN_ORDER <= self._at < end:  # a reader of the first block alone does not need the next ones
      self._content.will_read([(self._at, end - self._at)])
    data = self._content.read(self._at, min(len(view), IN_ORDER))
    view[: len(data)] = data
    self._at += len(data)
    return len(data)


def _blocks() -> list[tuple[float, int, pathlib.Path]]:
  """Returns the time, the size and the path of each block on the disk."""
  found = []
  for path in (cache() / 'blocks').glob('*/*/*'):
    with contextlib.suppress(OSError):
      stat = path.stat()
      found.append((stat.st_mtime, stat.st_size, path))
  return found


def _keep(path: pathlib.Path, data: bytes) -> None:
  """Writes a block to the disk; a full disk only makes the cache smaller."""
  with contextlib.suppress(OSError):
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f'{path.name}.{uuid.uuid4().hex[:8]}')
    unfinished.write_bytes(data)
    unfinished.replace(path)
    _make_room(len(data))


def _make_room(size: int) -> None:
  """Counts a new block, and removes the oldest ones if there are too many."""
  with _lock:
    used = (_used[0] if _used else sum(s for _, s, _ in _blocks())) + size
    if used > most_bytes():
      used = 0
      for _, s, path in sorted(_blocks(), reverse=True):  # the newest first
        if used + s > 0.9 * most_bytes():
          path.unlink(missing_ok=True)
        else:
          used += s
    _used[:] = [used]
