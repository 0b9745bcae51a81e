"""Tensors of a safetensors file, on this machine or at an address, read one at a time."""

import dataclasses
import functools
import math
from collections.abc import Callable

import ml_dtypes
import numpy as np

from paxlite.core.errors import UserError
from paxlite.core.json_text import parsed
from paxlite.files.content import Content
from paxlite.files.schemes import content_of, is_address

_HEADER_BYTES = 100 << 20  # the format allows no longer header
DTYPES: dict[str, type] = {
  'F64': np.float64, 'F32': np.float32, 'F16': np.float16, 'BF16': ml_dtypes.bfloat16,
  'F8_E4M3': ml_dtypes.float8_e4m3fn, 'F8_E5M2': ml_dtypes.float8_e5m2,
  'F8_E8M0': ml_dtypes.float8_e8m0fnu, 'I64': np.int64, 'I32': np.int32, 'I16': np.int16,
  'I8': np.int8, 'U64': np.uint64, 'U32': np.uint32, 'U16': np.uint16, 'U8': np.uint8,
  'BOOL': np.bool_,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class FileTensor:
  """A tensor of a file."""

  path: str  # the path or address of the file
  name: str  # its name in the file
  dtype: str  # the name of its dtype in the format
  shape: tuple[int, ...]
  offset: int  # where it begins in the file
  size: int  # its bytes
  content: Callable[[], Content]  # returns the bytes of the file

  def read(self) -> np.ndarray:
    """Reads the tensor; raises UserError if the file cannot be read, or has an unknown dtype."""
    if self.dtype not in DTYPES:
      raise UserError(f'{self.name} of {self.path} has the dtype {self.dtype}, which is not read')
    return np.frombuffer(self.data(), DTYPES[self.dtype]).reshape(self.shape)

  def data(self) -> bytes | bytearray:
    """Reads the bytes of the tensor; raises UserError if the file cannot be read."""
    return self.content().read(self.offset, self.size)


def tensors_in(path: str) -> list[FileTensor]:
  """Returns the tensors of a file.

  Raises UserError if it is not there, or is not a safetensors file.
  """
  damaged = f'{path} is damaged or truncated'
  content = content_of(path, kept=False)
  # a file here is opened again for each tensor: they are many, and few files can be open
  again = (lambda: content) if is_address(path) else functools.partial(content_of, path)
  length = int.from_bytes(content.read(0, 8), 'little')
  start = 8 + length
  if not 2 <= length <= min(_HEADER_BYTES, content.size - 8):
    raise UserError(damaged)
  found = []
  try:
    table = parsed(bytes(content.read(8, length)), unique=True)
    table.pop('__metadata__', None)
    for name, described in table.items():
      (begin, end), dtype = described['data_offsets'], described['dtype']
      shape = tuple(described['shape'])
      if {type(x) for x in (begin, end, *shape)} != {int} or min(begin, *shape, 0) < 0:
        raise ValueError(name)
      if dtype in DTYPES and end - begin != math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize:
        raise ValueError(name)
      found.append(FileTensor(path, name, dtype, shape, start + begin, end - begin, again))
  except (ValueError, LookupError, TypeError, AttributeError) as e:
    raise UserError(f'{damaged} ({e!r})') from None
  end, last = start, 'the header'
  for tensor in sorted(found, key=lambda t: (t.offset, t.size)):  # one behind the other, as written
    if tensor.offset != end:
      what = 'overlap' if tensor.offset < end else 'have a hole between them'
      raise UserError(f'{damaged}: {last} and {tensor.name} {what}')
    end, last = tensor.offset + tensor.size, tensor.name
  if end != content.size:
    raise UserError(f'{damaged}: it has {content.size:,} bytes, and its tensors end at {end:,}')
  return found
