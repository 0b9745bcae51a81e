"""Reads the description of an array on disk (.zarray of zarr v2), and its chunks.

A checkpoint may come from an untrusted source. Before anything is allocated, its description must
prove to be a grid of files that hold numbers and have the right sizes. A compressed chunk is
decompressed only up to the size in the description.
"""

import dataclasses
import itertools
import math
import pathlib
import re
import zlib
from collections.abc import Iterator
from typing import Literal

import ml_dtypes
import numpy as np
import zstandard

from paxlite.core import host_memory
from paxlite.core.errors import UserError
from paxlite.core.json_text import Json
from paxlite.files.json_files import read_object

_MAX_RANK = 32
# Arrays of Python objects ('|O') are not allowed: reading one from a file can execute code.
_PLAIN = re.compile(r'[<>|=]?(b1|[iu][1248]|f[248])')
_EXTENDED = ('bfloat16', 'float8_e4m3fn', 'float8_e5m2', 'float8_e4m3fnuz', 'float8_e5m2fnuz')
_BLOSC_HEADER = 16  # bytes; 4 to 8 hold the decompressed size, 12 to 16 the compressed one
_READ_BYTES = 1 << 24


@dataclasses.dataclass(frozen=True)
class ArrayDescription:
  """An array that is stored in chunks, one file per chunk.

  Attributes:
    shape: Shape of the full array.
    chunks: Shape of a chunk; the last chunks have the same shape and are padded.
    dtype: Dtype of the elements, numbers or booleans.
    separator: Character between the numbers of a chunk in the name of its file.
    order: Order of the elements in a chunk, 'C' or 'F'.
    compressor: None, 'zstd', 'gzip', 'zlib' or 'blosc'.
  """

  shape: tuple[int, ...]
  chunks: tuple[int, ...]
  dtype: np.dtype
  separator: str = '.'
  order: Literal['C', 'F'] = 'C'
  compressor: str | None = None

  @property
  def grid(self) -> list[int]:
    """Number of chunks along each dimension."""
    return [-(-s // c) for s, c in zip(self.shape, self.chunks, strict=True)]

  @property
  def num_chunks(self) -> int:
    return math.prod(self.grid)

  @property
  def chunk_bytes(self) -> int:
    """Size of an uncompressed chunk in bytes."""
    return math.prod(self.chunks) * self.dtype.itemsize

  @property
  def _is_mapped(self) -> bool:
    return self.compressor is None and self.order == 'C'

  def positions(self) -> Iterator[tuple[int, ...]]:
    """Yields the position of each chunk in the grid."""
    return itertools.product(*map(range, self.grid))

  def check_chunk(self, path: pathlib.Path) -> None:
    """Raises UserError if a chunk is missing, or its size differs from the description."""
    if not path.is_file():  # zarr would read a missing chunk as zeros.
      raise UserError(f'{path} is missing: the variable is incomplete')
    size = path.stat().st_size
    if self.compressor is None and size != self.chunk_bytes:
      raise UserError(f'{path} has {size:,} bytes and needs {self.chunk_bytes:,}')
    if self.compressor is not None:
      with path.open('rb') as f:
        self._check_held(path, _held_bytes(self.compressor, f.read(64)))

  def open_chunk(self, path: pathlib.Path) -> np.ndarray:
    """Returns a chunk; an uncompressed one in C order is mapped, so only used parts are read."""
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
      raise UserError(
        f'{path} cannot be read: it holds more or fewer than {self.chunk_bytes:,} bytes'
      )
    return np.frombuffer(elements, self.dtype).reshape(self.chunks, order=self.order)

  def _check_held(self, path: pathlib.Path, held: int | None) -> None:
    if held is not None and held != self.chunk_bytes:
      raise UserError(f'{path} holds {held:,} bytes and needs {self.chunk_bytes:,}')


def read_description(folder: pathlib.Path) -> ArrayDescription:
  """Reads the .zarray file in a variable's folder.

  Raises:
    UserError: The file is missing or damaged, or describes an array that is not of numbers or is
      encoded in a way that is not supported.
  """
  path = folder / '.zarray'
  found = read_object(path)
  refuse = lambda what: UserError(f'{path} is damaged: {what}')
  shape: Json = found.get('shape')
  chunks: Json = found.get('chunks')
  for name, sizes, least in (('shape', shape, 0), ('chunks', chunks, 1)):
    if not isinstance(sizes, list) or len(sizes) > _MAX_RANK:
      raise refuse(f'{name} is not a list of at most {_MAX_RANK} numbers')
    if not all(type(n) is int and least <= n < 1 << 62 for n in sizes):
      raise refuse(f'{name} holds something else than numbers from {least} on')
  if len(shape) != len(chunks):
    raise refuse(f'shape has {len(shape)} numbers and chunks {len(chunks)}')
  dtype = found.get('dtype')
  if not isinstance(dtype, str) or not (dtype in _EXTENDED or _PLAIN.fullmatch(dtype)):
    raise UserError(f'{path}: dtype {str(dtype)[:40]!r} is not a type of numbers')
  if found.get('filters'):
    raise UserError(f'{path} has filters, and paxlite reads arrays without filters alone')
  separator, order = found.get('dimension_separator', '.'), found.get('order', 'C')
  if separator not in ('.', '/') or order not in ('C', 'F'):
    raise refuse(f'dimension_separator {separator!r} or order {order!r}')
  compressor = found.get('compressor')
  codec = compressor.get('id') if isinstance(compressor, dict) else compressor
  if codec not in (None, 'zstd', 'gzip', 'zlib', 'blosc'):
    raise UserError(f'{path}: paxlite cannot read chunks compressed by {str(codec)[:40]!r}')
  kind = getattr(ml_dtypes, dtype) if dtype in _EXTENDED else dtype
  return ArrayDescription(tuple(shape), tuple(chunks), np.dtype(kind), separator, order, codec)


def _held_bytes(compressor: str | None, start: bytes) -> int | None:
  """Returns the decompressed size that a chunk states in its first 64 bytes, or None."""
  if compressor == 'zstd':
    try:
      held = zstandard.frame_content_size(start)
    except zstandard.ZstdError:
      return None  # Decompressing will report what is wrong.
    return None if held < 0 else held
  if compressor == 'blosc' and len(start) >= _BLOSC_HEADER:
    return int.from_bytes(start[4:8], 'little')
  return None


def _decompressed(compressor: str | None, content: bytes, size: int) -> bytes:
  """Returns a decompressed chunk; zstd, gzip and zlib stop after `size` + 1 bytes."""
  if compressor == 'zstd':
    parts, left = [], size + 1  # It allocates for the data that is there, not for the claimed size.
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

    # The library trusts the header, and would read beyond the end of the content.
    if len(content) < _BLOSC_HEADER or int.from_bytes(content[12:16], 'little') != len(content):
      raise ValueError('it is cut off, or not a chunk of Blosc')
    return numcodecs.Blosc().decode(content)
  return content
