"""Tensors of a safetensors file in an object store, read by ranges, one at a time."""

import concurrent.futures
import functools

import ml_dtypes
import numpy as np

from paxlite.core.errors import UserError
from paxlite.core.json_text import JsonObject, parsed
from paxlite.stores.object_store import Object, ObjectStore
from paxlite.stores.store_errors import reading

_HEADER_BYTES = 100 << 20  # the format allows no longer header
_RANGE = 16 << 20  # bytes of one request
_AT_ONCE = 8
_DTYPES: dict[str, type] = {
  'F64': np.float64, 'F32': np.float32, 'F16': np.float16, 'BF16': ml_dtypes.bfloat16,
  'F8_E4M3': ml_dtypes.float8_e4m3fn, 'I64': np.int64, 'I32': np.int32, 'I16': np.int16,
  'I8': np.int8, 'U8': np.uint8, 'BOOL': np.bool_,
}  # fmt: skip


class StoredTensors:
  """What safetensors.safe_open gives for a file, for an object.

  Args:
    address: The object.

  Raises:
    UserError: It is not there, or is not a safetensors file.
  """

  def __init__(self, address: str):
    self._address = address
    self._store, self._found, self._start, self._table = _opened(address)

  def keys(self) -> list[str]:
    return list(self._table)

  def get_slice(self, name: str) -> '_Described':
    return _Described(self._table[name])

  def get_tensor(self, name: str) -> np.ndarray:
    """Returns a tensor; its ranges are read at the same time."""
    described = self._table[name]
    begin, end = (self._start + x for x in described['data_offsets'])
    data = bytearray(end - begin)

    def read(at: int) -> None:
      stop = min(at + _RANGE, end)
      data[at - begin : stop - begin] = self._store.read_range('', at, stop, self._found.tag)

    with reading(self._address), concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
      list(pool.map(read, range(begin, end, _RANGE)))
    return np.frombuffer(data, _DTYPES[described['dtype']]).reshape(described['shape'])


class _Described:
  """The dtype and the shape of a tensor."""

  def __init__(self, described: JsonObject):
    self._described = described

  def get_dtype(self) -> str:
    return self._described['dtype']

  def get_shape(self) -> list[int]:
    return self._described['shape']


@functools.lru_cache(1024)
def _opened(address: str) -> tuple[ObjectStore, Object, int, JsonObject]:
  """Returns the bucket, the object, where its tensors begin, and its table of contents."""
  damaged = f'{address} is damaged or truncated'
  with reading(address):
    store = ObjectStore(address)
    try:
      found = store.head('')
    except FileNotFoundError:
      raise UserError(f'{address} is not there') from None
    if found.size < 8:
      raise UserError(damaged)
    length = int.from_bytes(store.read_range('', 0, 8, found.tag), 'little')
    if not 2 <= length <= min(_HEADER_BYTES, found.size - 8):
      raise UserError(damaged)
    header = store.read_range('', 8, 8 + length, found.tag)
  try:
    table = parsed(header)
    table.pop('__metadata__', None)
    ends = 0
    for described in table.values():
      begin, end = described['data_offsets']
      count = int(np.prod(described['shape'], dtype=np.int64))
      if end - begin != count * np.dtype(_DTYPES[described['dtype']]).itemsize or begin < 0:
        raise UserError(damaged)
      ends = max(ends, end)
  except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as e:
    raise UserError(f'{damaged} ({e!r})') from None
  if 8 + length + ends != found.size:
    raise UserError(damaged)
  return store, found, 8 + length, table
