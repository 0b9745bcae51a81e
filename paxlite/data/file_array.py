"""One-dimensional arrays in files. Only the requested values are read.

The files are read and not memory-mapped. If a mapped file is truncated while it is read, SIGBUS
ends the process without a message and with nothing saved.
"""

import bisect
import functools
import pathlib
from collections.abc import Iterable
from typing import overload

import numpy as np
from numpy.typing import DTypeLike

from paxlite.files.schemes import content_of

_BLOCK = 4096  # values of a sorted array that are read together
_MOST_BLOCKS = 1024  # blocks in the cache: 32 MiB with 8 bytes a value


class FileArray:
  """The values [n] of a file that holds nothing else; the file stays open.

  Raises UserError if the file has become shorter; raised when the missing part is read.

  Args:
    path: Path or address of the file.
    dtype: Data type of the values.
  """

  def __init__(self, path: str | pathlib.Path, dtype: DTypeLike):
    self.path, self.dtype = str(path), np.dtype(dtype)
    self._content = content_of(self.path)
    self._width = self.dtype.itemsize
    self._count = self._content.size // self._width

  @property
  def read_ahead(self) -> int:
    """How many batches of rows `will_read` should know of; 0 for a file on this machine."""
    return self._content.read_ahead

  def will_read(self, parts: Iterable[tuple[int, int]]) -> None:
    """Begins to fetch values that will be read soon: (first, count) of each part."""
    self._content.will_read((first * self._width, count * self._width) for first, count in parts)

  def __len__(self) -> int:
    return self._count

  @overload
  def __getitem__(self, where: int) -> np.integer: ...
  @overload
  def __getitem__(self, where: slice) -> np.ndarray: ...
  def __getitem__(self, where: int | slice) -> np.integer | np.ndarray:
    """Returns one value, or the values of a slice without a step."""
    if isinstance(where, slice):
      start, stop, _ = where.indices(self._count)
      return self._read(start, stop)
    index = int(where) + (self._count if where < 0 else 0)
    return self._read(index, index + 1)[0]

  def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
    return self[:].astype(dtype or self.dtype)

  def _read(self, start: int, stop: int) -> np.ndarray:
    data = self._content.read(start * self._width, max(0, stop - start) * self._width)
    return np.frombuffer(data, self.dtype)


class SortedFileArray(FileArray):
  """A FileArray with ascending values; single values and searches read one block at a time."""

  def __init__(self, path: str | pathlib.Path, dtype: DTypeLike):
    super().__init__(path, dtype)
    self._block = functools.lru_cache(_MOST_BLOCKS)(
      lambda block: self._read(block * _BLOCK, min((block + 1) * _BLOCK, self._count))
    )
    self._firsts = _Firsts(self)

  @overload
  def __getitem__(self, where: int) -> np.integer: ...
  @overload
  def __getitem__(self, where: slice) -> np.ndarray: ...
  def __getitem__(self, where: int | slice) -> np.integer | np.ndarray:
    if isinstance(where, slice):
      return super().__getitem__(where)
    block, place = divmod(int(where) + (self._count if where < 0 else 0), _BLOCK)
    return self._block(block)[place]

  def searchsorted(self, values: np.ndarray) -> np.ndarray:
    """Returns the index of the first element that is not less than each value [b], as in NumPy."""
    return np.array([self._search(value) for value in values], np.int64)

  def _search(self, value: np.integer) -> int:
    block = max(0, bisect.bisect_left(self._firsts, value) - 1)
    return block * _BLOCK + int(self._block(block).searchsorted(value))


class _Firsts:
  """A sequence of the first value of each block; each is read on first use, then kept."""

  def __init__(self, array: SortedFileArray):
    self._array = array
    self._known: dict[int, np.integer] = {}

  def __len__(self) -> int:
    return -(-len(self._array) // _BLOCK)

  def __getitem__(self, block: int) -> np.integer:
    if block not in self._known:
      self._known[block] = FileArray.__getitem__(self._array, block * _BLOCK)
    return self._known[block]
