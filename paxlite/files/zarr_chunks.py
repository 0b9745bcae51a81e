"""The chunks of an array of zarr v2, checked before a library opens them.

The files may come from anybody. zarr and tensorstore allocate what the description and the chunks
say, and read a chunk that is missing as zeros.
"""

import math
import pathlib
import re

import zstandard

from paxlite.core import host_memory
from paxlite.core.errors import UserError, naming
from paxlite.files.json_files import read_object

# Arrays of Python objects ('|O') are not allowed: reading one from a file can execute code.
_PLAIN = re.compile(r'[<>|=]?(?:b1|[iu][1248]|f[248])')
EXTENDED = ('bfloat16', 'float8_e4m3fn', 'float8_e5m2', 'float8_e4m3fnuz', 'float8_e5m2fnuz')
STATING = (None, 'blosc', 'lz4', 'zstd')  # codecs whose chunks state their decompressed size
_HEADER = 18  # bytes; enough for the header of a frame of zstd
_MOST = 1 << 62


class ZarrChunks:
  """The description of an array, and its chunks, one file each.

  Raises UserError if the description is missing or damaged, or is that of something else than
  numbers, or a compressed chunk does not fit in memory.

  Args:
    folder: The array's folder.
    codecs: The compressors that are accepted; None: none.

  Attributes:
    shape: Shape of the array.
    chunks: Shape of a chunk; the last chunks have the same shape and are padded.
    dtype: Dtype of the elements as the description has it, numbers or booleans.
    filters: What else changes the elements, or None.
    order: Order of the elements in a chunk, 'C' or 'F'.
    codec: The compressor, or None.
    separator: Character between the numbers of a chunk in the name of its file.
    chunk_bytes: Size of a decompressed chunk.
  """

  def __init__(self, folder: pathlib.Path, codecs: tuple[str | None, ...] = STATING):
    self._folder, path = folder, folder / '.zarray'
    found = read_object(path)
    for name, least in (('shape', 0), ('chunks', 1)):
      sizes = found.get(name)
      if not isinstance(sizes, list) or len(sizes) != len(found['shape']) or len(sizes) > 32:
        raise UserError(
          f'{path} is damaged: {name} is not a list of as many sizes as the array has'
        )
      if not all(type(n) is int and least <= n < _MOST for n in sizes):
        raise UserError(f'{path} is damaged: {name} has other sizes than numbers from {least} on')
    self.shape, self.chunks = tuple(found['shape']), tuple(found['chunks'])
    dtype, compressor = found.get('dtype'), found.get('compressor')
    if not isinstance(dtype, str) or not (dtype in EXTENDED or _PLAIN.fullmatch(dtype)):
      raise UserError(f'{path}: dtype {str(dtype)[:40]!r} is not a type of numbers')
    self.codec = compressor.get('id') if isinstance(compressor, dict) else compressor
    if self.codec not in codecs:
      raise UserError(
        f'{path}: compression by {str(self.codec)[:40]!r} is not supported; use '
        f'{", ".join(filter(None, codecs))}'
      )
    self.dtype, self.filters, self.order = dtype, found.get('filters'), found.get('order', 'C')
    self.separator = found.get('dimension_separator', '.')
    if self.order not in ('C', 'F') or self.separator not in ('.', '/'):
      raise UserError(f'{path} is damaged: order {self.order!r} or separator {self.separator!r}')
    width = {'bfloat16': 2}.get(dtype) or (1 if dtype in EXTENDED else int(dtype[-1]))
    self.chunk_bytes = math.prod(self.chunks) * width
    left = host_memory.available()
    if self.codec is not None and left is not None and self.chunk_bytes > left:
      raise UserError(f'{path}: a chunk of {self.chunk_bytes:,} bytes does not fit in memory')

  @property
  def grid(self) -> list[int]:
    """Number of chunks along each dimension."""
    return [-(-s // c) for s, c in zip(self.shape, self.chunks, strict=True)]

  def path(self, *position: int) -> pathlib.Path:
    """Returns the file of the chunk at a position in the grid."""
    return self._folder / (self.separator.join(map(str, position)) or '0')

  def check(self, *position: int) -> None:
    """Raises UserError if a chunk is missing, or holds another number of bytes than it should."""
    path = self.path(*position)
    if not path.is_file():
      raise UserError(f'{path} is missing: the array is incomplete')
    with naming(path), path.open('rb') as f:
      held = self._held(f.read(_HEADER)) if self.codec is not None else path.stat().st_size
    if held != self.chunk_bytes and (held is not None or self.codec in STATING):
      said = 'an unknown number of' if held is None else f'{held:,}'
      raise UserError(f'{path} is damaged: it holds {said} bytes and needs {self.chunk_bytes:,}')

  def _held(self, header: bytes) -> int | None:
    """Returns the decompressed size that a chunk states."""
    if self.codec == 'blosc' and len(header) >= 16:
      return int.from_bytes(header[4:8], 'little')
    if self.codec == 'lz4' and len(header) >= 4:
      return int.from_bytes(header[:4], 'little')
    try:
      held = zstandard.frame_content_size(header) if self.codec == 'zstd' else -1
    except zstandard.ZstdError:
      return None
    return held if held >= 0 else None
