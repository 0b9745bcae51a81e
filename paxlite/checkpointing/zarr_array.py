"""What the description of an array on disk (.zarray of zarr v2) says, and its chunks.

A checkpoint may come from somebody else. So its description is taken for what it may be, numbers in
a grid of files of the right sizes, before anything is allocated; and a compressed chunk is
decompressed up to the size that the description gives it, and no further.
"""

import dataclasses
import itertools
import math
import pathlib
import re
import zlib
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import zstandard

from paxlite.core import host_memory
from paxlite.core.errors import UserError
from paxlite.core.json_files import read_object

_MAX_RANK = 32
# Arrays of Python objects ('|O') are pointers in memory: to read one from a file is to run it.
_PLAIN = re.compile(r'[<>|=]?(b1|[iu][1248]|f[248])')
_EXTENDED = ('bfloat16', 'float8_e4m3fn', 'float8_e5m2', 'float8_e4m3fnuz', 'float8_e5m2fnuz')
_BLOSC_HEADER = 16  # bytes; 4 to 8 hold the size of what it holds, 12 to 16 its own
_READ_BYTES = 1 << 24


@dataclasses.dataclass(frozen=True)
class ArrayDescription:
  """An array in chunks, a file each.

  Attributes:
    shape: Shape of the whole array.
    chunks: Shape of a chunk; those at the end are as large, and padded.
    dtype: A dtype of numbers or booleans.
    separator: Between a chunk's numbers in its file's name.
    order: 'C' or 'F', of the elements in a chunk.
    compressor: None, 'zstd', 'gzip', 'zlib' or 'blosc'.
  """

  shape: tuple[int, ...]
  chunks: tuple[int, ...]
  dtype: np.dtype
  separator: str = '.'
  order: Any = 'C'
  compressor: str | None = None

  @property
  def grid(self) -> list[int]:
    """Chunks by dimension."""
    return [-(-s // c) for s, c in zip(self.shape, self.chunks, strict=True)]

  @property
  def num_chunks(self) -> int:
    return math.prod(self.grid)

  @property
  def chunk_bytes(self) -> int:
    """Bytes of a chunk that is not compressed."""
    return math.prod(self.chunks) * self.dtype.itemsize

  @property
  def _is_mapped(self) -> bool:
    return self.compressor is None and self.order == 'C'

  def positions(self) -> Iterator[tuple[int, ...]]:
    """Number of chunks in the grid."""
    return itertools.product(*map(range, self.grid))

  def check_chunk(self, path: pathlib.Path) -> None:
    """Raises UserError where a chunk is missing, or its size is not what the description says."""
    if not path.is_file():  # which zarr reads as zeros
      raise UserError(f'{path} is missing: the variable is incomplete')
    size = path.stat().st_size
    if self.compressor is None and size != self.chunk_bytes:
      raise UserError(f'{path} has {size:,} bytes and needs {self.chunk_bytes:,}')
    if self.compressor is not None:
      with path.open('rb') as f:
        self._check_held(path, _held_bytes(self.compressor, f.read(64)))

  def open_chunk(self, path: pathlib.Path) -> np.ndarray:
    """A chunk; one that is not compressed is mapped, so that a part of it costs that part."""
    if self._is_mapped:
      return np.memmap(path, self.dtype, 'r', shape=self.chunks)
    left = host_memory.available()
    if left is not None and self.chunk_bytes > left:
      raise UserError(f'{path}: a chunk of {self.chunk_bytes:,} bytes does not fit in memory')
    try:
      content = path.read_bytes()
      self._check_held(path, _held_bytes(self.compressor, content[:64]))
      elements = _decompressed(self.compressor, content, self.chunk_bytes)
    except (OSError, ValueError, EOFError, RuntimeError, zlib.error, zstandard.ZstdError) as e:
      raise UserError(f'{path} cannot be read: {str(e).splitlines()[0][:200]}') from None
    except (MemoryError, OverflowError):
      raise UserError(f'{path}: its {self.chunk_bytes:,} bytes do not fit in memory') from None
    if len(elements) != self.chunk_bytes:
      raise UserError(f'{path} cannot be read: it holds other than {self.chunk_bytes:,} bytes')
    return np.frombuffer(elements, self.dtype).reshape(self.chunks, order=self.order)

  def _check_held(self, path: pathlib.Path, held: int | None) -> None:
    if held is not None and held != self.chunk_bytes:
      raise UserError(f'{path} holds {held:,} bytes and needs {self.chunk_bytes:,}')


def read_description(folder: pathlib.Path) -> ArrayDescription:
  """Reads .zarray of a variable's folder.

  Raises:
    UserError: it is missing or damaged, or describes something else than numbers.
  """
  path = folder / '.zarray'
  found: Any = read_object(path)
  refuse = lambda what: UserError(f'{path} is damaged: {what}')
  shape, chunks = found.get('shape'), found.get('chunks')
  for name, sizes, least in (('shape', shape, 0), ('chunks', chunks, 1)):
    if not isinstance(sizes, list) or len(sizes) > _MAX_RANK:
      raise refuse(f'{name} is no list of at most {_MAX_RANK} numbers')
    if not all(type(n) is int and least <= n < 1 << 62 for n in sizes):
      raise refuse(f'{name} holds something else than numbers from {least} on')
  if len(shape) != len(chunks):
    raise refuse(f'shape has {len(shape)} numbers and chunks {len(chunks)}')
  dtype = found.get('dtype')
  if not isinstance(dtype, str) or not (dtype in _EXTENDED or _PLAIN.fullmatch(dtype)):
    raise UserError(f'{path}: dtype {str(dtype)[:40]!r} is not one of numbers')
  if found.get('filters'):
    raise UserError(f'{path} has filters, which are not read')
  separator, order = found.get('dimension_separator', '.'), found.get('order', 'C')
  if separator not in ('.', '/') or order not in ('C', 'F'):
    raise refuse(f'dimension_separator {separator!r} or order {order!r}')
  compressor = found.get('compressor')
  codec: Any = compressor.get('id') if isinstance(compressor, dict) else compressor
  if codec not in (None, 'zstd', 'gzip', 'zlib', 'blosc'):
    raise UserError(f'{path}: chunks compressed by {str(codec)[:40]!r} are not read')
  kind: Any = getattr(ml_dtypes, dtype) if dtype in _EXTENDED else dtype
  return ArrayDescription(tuple(shape), tuple(chunks), np.dtype(kind), separator, order, codec)


def _held_bytes(compressor: str | None, start: bytes) -> int | None:
  """The size that a compressed chunk states in its first 64 bytes; None where it states none."""
  if compressor == 'zstd':
    try:
      held = zstandard.frame_content_size(start)
    except zstandard.ZstdError:
      return None  # decompressing says what is wrong
    return None if held < 0 else held
  if compressor == 'blosc' and len(start) >= _BLOSC_HEADER:
    return int.from_bytes(start[4:8], 'little')
  return None


def _decompressed(compressor: str | None, content: bytes, size: int) -> bytes:
  """A chunk of `size` bytes; decompressing ends one byte further."""
  if compressor == 'zstd':
    parts, left = [], size + 1  # as much at a time as there is, not as much as is claimed
    with zstandard.ZstdDecompressor().stream_reader(content) as reader:
      while left > 0 and (part := reader.read(min(left, _READ_BYTES))):
        parts.append(part)
        left -= len(part)
    return b''.join(parts)
  if compressor in ('gzip', 'zlib'):
    stream = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)
    elements = stream.decompress(content, size + 1)
    if len(elements) <= size and not stream.eof:
      raise ValueError('it is cut off')
    return elements
  if compressor == 'blosc':
    import numcodecs

    # the library believes the header, and reads beyond what is there
    if len(content) < _BLOSC_HEADER or int.from_bytes(content[12:16], 'little') != len(content):
      raise ValueError('it is cut off, or no chunk of Blosc')
    return numcodecs.Blosc().decode(content)
  return content
