"""Reading parts of objects: blocks with a cache on this machine's disk, several at a time.

The cache is in paxlite/objects/blocks in XDG_CACHE_HOME or ~/.cache. It takes at most
PAXLITE_CACHE_GB (100). If it is full, the blocks that were fetched first are removed. Blocks of an
object that has changed have other names, so they are never mixed.
"""

import collections
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
from paxlite.stores.addresses import Address
from paxlite.stores.object_copies import most_bytes, reading
from paxlite.stores.object_store import ObjectStore

if TYPE_CHECKING:
  from _typeshed import WriteableBuffer

IN_ORDER = 4 << 20  # bytes of a block of a file that is read from its beginning to its end
AT_RANDOM = 1 << 18  # bytes of a block of a file whose short parts are read in any order
_AHEAD = 4  # blocks that are read ahead of a file that is read in order
_AT_ONCE = 32
_IN_MEMORY = 16 << 20  # bytes of the blocks of one object


@functools.cache
def _pool() -> concurrent.futures.ThreadPoolExecutor:
  return concurrent.futures.ThreadPoolExecutor(_AT_ONCE, thread_name_prefix='objects')


class ObjectBytes:
  """The bytes of an object, which can be read in any order, by several threads.

  Args:
    address: The object.
    block: Bytes of a block: a request reads one block.

  Attributes:
    size: Bytes of the object.
    read_ahead: How many batches of rows should be fetched before they are read.

  Raises:
    UserError: There is no such object, or the store cannot be used.
  """

  read_ahead = 16

  def __init__(self, address: Address, block: int = AT_RANDOM):
    self.address = address
    with reading(address):
      self._store = ObjectStore.opened(address)
      try:
        found = self._store.head(address.key)
      except FileNotFoundError:
        raise AbsentError(f'{address} is not there') from None
    self.size, self._tag = found.size, found.tag
    self._block = block
    version = hashlib.sha256(f'{address} {found.tag} {found.size} {block}'.encode()).hexdigest()
    self._folder = cache() / 'blocks' / version[:24]
    self._lock = threading.Lock()
    self._coming: dict[int, concurrent.futures.Future] = {}
    self._recent: collections.OrderedDict[int, bytes] = collections.OrderedDict()

  def read(self, offset: int, length: int) -> bytes:
    """Returns `length` bytes from `offset` on; fewer at the end of the object.

    Raises:
      UserError: The store cannot be read.
    """
    end = min(offset + length, self.size)
    if offset >= end:
      return b''
    first, last = offset // self._block, (end - 1) // self._block
    if last > first:
      self._fetch(range(first, last + 1))
    parts = [self._get(number) for number in range(first, last + 1)]
    start = offset - first * self._block
    return b''.join(parts)[start : start + end - offset]

  def will_read(self, parts: Iterable[tuple[int, int]]) -> None:
    """Begins to fetch parts, (offset, length) each, that will be read soon."""
    numbers = (
      number
      for offset, length in parts
      for number in range(
        offset // self._block, (min(offset + length, self.size) - 1) // self._block + 1
      )
    )
    self._fetch(numbers)

  def _fetch(self, numbers: Iterable[int]) -> None:
    """Begins to fetch blocks onto the disk; they are not kept in memory."""
    with self._lock:
      for number in numbers:
        if number not in self._coming and number not in self._recent:
          self._coming[number] = _pool().submit(self._bring, number)

  def _bring(self, number: int) -> None:
    try:
      if not self._path(number).exists():
        self._load(number)
    finally:
      with self._lock:
        del self._coming[number]

  def _get(self, number: int) -> bytes:
    with self._lock:
      if number in self._recent:
        self._recent.move_to_end(number)
        return self._recent[number]
      coming = self._coming.get(number)
    if coming is not None:
      coming.result()
    data = self._load(number)
    with self._lock:
      self._recent[number] = data
      while len(self._recent) > _IN_MEMORY // self._block:
        self._recent.popitem(last=False)
    return data

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
    with reading(self.address):
      data = self._store.read_range(self.address.key, start, start + length, self._tag)
      if len(data) != length:
        raise OSError(errno.EIO, f'the store sent {len(data):,} of {length:,} bytes')
    _keep(path, data)
    return data


def open_object(address: Address) -> IO[bytes]:
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

  def tell(self) -> int:
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


class _Room:
  """The space that the blocks of all objects take on the disk."""

  def __init__(self) -> None:
    self.lock = threading.Lock()
    self.used: int | None = None

  def take(self, size: int) -> None:
    """Counts a new block, and removes the oldest ones if there are too many."""
    with self.lock:
      if self.used is None:
        self.used = sum(s for _, s, _ in _blocks())
      self.used += size
      if self.used > most_bytes():
        self.used = 0
        for _, s, path in sorted(_blocks(), reverse=True):  # the newest first
          if self.used + s > 0.9 * most_bytes():
            path.unlink(missing_ok=True)
          else:
            self.used += s


_room = _Room()


def _blocks() -> list[tuple[float, int, pathlib.Path]]:
  """Returns the time, the size and the path of each block on the disk."""
  found = []
  for parent, _, names in os.walk(cache() / 'blocks'):
    for name in names:
      with contextlib.suppress(OSError):
        path = pathlib.Path(parent, name)
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
    _room.take(len(data))
