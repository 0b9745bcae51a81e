"""What a chunk of an array on disk (zarr v2) will take in memory, before it is decompressed."""

import pathlib

from paxlite.core import host_memory
from paxlite.core.errors import UserError, naming
from paxlite.files.json_files import read_object

_HEADER = 18  # bytes; enough for the header of a frame of zstd
_WIDTHS = {'<u4': 4, '<u8': 8}
_CODECS = (None, 'blosc', 'zstd', 'lz4')


class Chunks:
  """The chunks of an array of one dimension, whose compressed bytes may come from anybody.

  Args:
    folder: The array's folder.

  Raises:
    UserError: Its description is damaged, or a chunk does not fit in memory.
  """

  def __init__(self, folder: pathlib.Path):
    self._folder = folder
    path = folder / '.zarray'
    found = read_object(path)
    chunks, compressor = found.get('chunks'), found.get('compressor')
    if not isinstance(chunks, list) or len(chunks) != 1 or type(chunks[0]) is not int:
      raise UserError(f'{path} is damaged: chunks is not a list of one number')
    self._codec = compressor.get('id') if isinstance(compressor, dict) else compressor
    if self._codec not in _CODECS:
      raise UserError(
        f'{path}: chunks compressed by {str(self._codec)[:40]!r} do not say how large they are, so '
        'they are not read: tokenize again'
      )
    self._size = chunks[0] * _WIDTHS.get(str(found.get('dtype')), 8)
    left = host_memory.available()
    if left is not None and self._size > left:
      raise UserError(f'{path}: a chunk of {self._size:,} bytes does not fit in memory')

  def check(self, number: int) -> None:
    """Raises UserError if a chunk says that it holds more than the description."""
    path = self._folder / str(number)
    with naming(path), path.open('rb') as f:
      held = _held_bytes(self._codec, f.read(_HEADER))
    if self._codec is not None and held != self._size:
      said = 'an unknown number of' if held is None else f'{held:,}'
      raise UserError(f'{path} is damaged: it holds {said} bytes and needs {self._size:,}')


def _held_bytes(codec: str | None, header: bytes) -> int | None:
  """Returns the decompressed size that a chunk states, and to which it is decompressed."""
  if codec == 'blosc' and len(header) >= 16:
    return int.from_bytes(header[4:8], 'little')
  if codec == 'lz4' and len(header) >= 4:
    return int.from_bytes(header[:4], 'little')
  if codec == 'zstd':
    import zstandard

    try:
      held = zstandard.frame_content_size(header)
    except zstandard.ZstdError:
      return None
    return held if held >= 0 else None
  return None
