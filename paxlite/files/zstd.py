"""Reads zstd block by block, because a few compressed bytes may hold gigabytes."""

import io
import types
from typing import IO, TYPE_CHECKING, Any

from paxlite.core import host_memory

if TYPE_CHECKING:
  from _typeshed import WriteableBuffer

_MAGIC = 0xFD2FB528
_SKIPPABLE = range(0x184D2A50, 0x184D2A60)
_RLE = 1
_LARGEST = 1 << 31  # bytes of the largest window that zstd decompresses
_USUAL = 1 << 27  # the largest window of a file that was compressed without --long


class ZstdReader(io.RawIOBase):
  """Decompresses frame after frame; a frame that is cut off raises an EOFError.

  zstandard's readers either end silently at such a frame, or decompress all their input at once.
  This reader therefore walks the frames itself (RFC 8878) and decompresses one block at a time,
  which holds at most 128 KiB. In addition to a block, memory holds the window of the frame.

  Args:
    raw: The compressed file.
    zstandard: The package zstandard.
    most: Bytes of the largest window. None: all that zstd knows, 2 GiB, if that is at most a
      quarter of the memory that is left, but always the 128 MiB of `zstd --ultra -22`.
  """

  def __init__(self, raw: IO[bytes], zstandard: types.ModuleType, most: int | None = None):
    self._raw = raw
    self._zstandard = zstandard
    self._most = most_window() if most is None else most
    self._frame: Any = None  # None between frames
    self._has_checksum = False
    self._plain = memoryview(b'')

  def readable(self) -> bool:
    return True

  def readinto(self, buffer: 'WriteableBuffer') -> int:
    view = memoryview(buffer)
    while not self._plain:
      try:
        if self._frame is not None:
          self._plain = memoryview(self._block())
        elif not self._begin():
          return 0
      except self._zstandard.ZstdError as e:
        raise OSError(str(e)) from None
    count = min(len(view), len(self._plain))
    view[:count] = self._plain[:count]
    self._plain = self._plain[count:]
    return count

  def close(self) -> None:
    self._raw.close()
    super().close()

  def _begin(self) -> bool:
    """Reads the header of a frame; returns whether there was a frame."""
    start = self._raw.read(4)
    if not start:
      return False
    magic = int.from_bytes(start + self._exactly(4 - len(start)), 'little')
    if magic in _SKIPPABLE:
      left = int.from_bytes(self._exactly(4), 'little')
      while left:
        left -= len(self._exactly(min(left, 1 << 18)))
      return True
    if magic != _MAGIC:
      raise OSError('the content is not a zstd frame')
    descriptor = self._exactly(1)
    flags = descriptor[0]
    is_single = bool(flags & 0x20)
    content_size = (1 if is_single else 0, 2, 4, 8)[flags >> 6]
    rest = self._exactly((not is_single) + (0, 1, 2, 4)[flags & 3] + content_size)
    size = int.from_bytes(rest[-content_size:], 'little') + (256 if content_size == 2 else 0)
    window = size if is_single else _window_bytes(rest[0])
    if window > self._most:
      raise OSError(
        f'it needs a window of {window >> 20:,} MiB; the limit is {self._most >> 20:,} MiB: '
        'compress it again with zstd --long=27, or decompress it with zstd -d --long=31'
      )
    self._has_checksum = bool(flags & 4)
    self._frame = self._zstandard.ZstdDecompressor(max_window_size=_LARGEST).decompressobj()
    self._frame.decompress(start + descriptor + rest)
    return True

  def _block(self) -> bytes:
    """The decompressed contents of the next block of the frame."""
    header = self._exactly(3)
    fields = int.from_bytes(header, 'little')
    size = 1 if fields >> 1 & 3 == _RLE else fields >> 3
    is_last = bool(fields & 1)
    compressed = header + self._exactly(size + (4 if is_last and self._has_checksum else 0))
    plain = self._frame.decompress(compressed)
    if is_last:
      if not self._frame.eof:
        raise OSError('a frame continues after its last block')
      self._frame = None
    return plain

  def _exactly(self, count: int) -> bytes:
    data = self._raw.read(count)
    if len(data) < count:
      raise EOFError('its last frame is cut off')
    return data


def most_window() -> int:
  """Returns the bytes of the largest window with which a file is decompressed here."""
  return min(_LARGEST, max(_USUAL, (host_memory.available() or 0) // 4))


def _window_bytes(descriptor: int) -> int:
  base = 1 << 10 + (descriptor >> 3)
  return base + base // 8 * (descriptor & 7)
