"""The header and the tensors of a GGUF file, or of all files of a model that is split.

The format is that of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The header is
parsed here, because the reader of the package gguf reads past the end of a file, and does not swap
the bytes of quantized tensors. The package is used to dequantize.
"""

import math
import pathlib
import re
import struct
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from paxlite.core import shell
from paxlite.core.errors import UserError
from paxlite.files.text_files import check_file
from paxlite.weights.known_keys import shortened

_SCALARS = {
  0: 'B',
  1: 'b',
  2: 'H',
  3: 'h',
  4: 'I',
  5: 'i',
  6: 'f',
  7: '?',
  10: 'Q',
  11: 'q',
  12: 'd',
}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_MOST = 1 << 24  # elements of a list, fields, or tensors: far more than any model has
_DIMENSIONS = 4
_ALIGNMENT = 'general.alignment'
_NO, _COUNT, _TENSORS = 'split.no', 'split.count', 'split.tensors.count'
_PART = re.compile(r'(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf')
SPLIT = frozenset((_NO, _COUNT, _TENSORS))


class _Damaged(Exception):
  """The file is not what the format asks for."""


class TensorInfo(NamedTuple):
  """Where a tensor is, and how.

  Attributes:
    file: The bytes of its file.
    start: Where its bytes begin.
    kind: Its GGMLQuantizationType.
    shape: Its shape, with the innermost dimension last.
    byte_shape: The shape of its bytes.
  """

  file: np.ndarray
  start: int
  kind: Any
  shape: tuple[int, ...]
  byte_shape: tuple[int, ...]


class _Header:
  """Reads a file from its start."""

  def __init__(self, path: pathlib.Path):
    if not path.stat().st_size:
      raise _Damaged('it is empty')
    self._data = np.memmap(path, np.uint8, 'r')
    self._at = 0

  def bytes(self, size: int) -> np.ndarray:
    if size > len(self._data) - self._at:
      raise _Damaged('it ends too early')
    self._at += size
    return self._data[self._at - size : self._at]

  def number(self, form: str) -> Any:
    return struct.unpack(f'<{form}', self.bytes(struct.calcsize(f'<{form}')).tobytes())[0]

  def count(self, what: str) -> int:
    found = self.number('Q')
    if found > len(self._data) - self._at:
      raise _Damaged(f'it ends too early for {found:,} {what}')
    if found > _MOST:
      raise _Damaged(f'{found:,} {what} are more than {_MOST:,}')
    return found

  def text(self) -> str:
    return self.bytes(self.number('Q')).tobytes().decode()

  def value(self, kind: int) -> object:
    """Returns a text, a number or a list of them."""
    if kind == _STRING:
      return self.text()
    if kind == _BOOL:
      value = self.number('B')
      if value > 1:
        raise _Damaged('a truth value is neither 0 nor 1')
      return bool(value)
    if kind in _SCALARS:
      return self.number(_SCALARS[kind])
    if kind != _ARRAY:
      raise _Damaged(f'there is no type {kind} of values')
    of, count = self.number('I'), self.count('elements of a list')
    if of == _STRING:
      return [self.text() for _ in range(count)]
    if of not in _SCALARS:
      raise _Damaged(f'lists of type {of} are not implemented')
    dtype = np.dtype(f'<{_SCALARS[of]}' if of != _BOOL else '?')
    return np.frombuffer(self.bytes(count * dtype.itemsize).tobytes(), dtype).tolist()

  def read(self) -> tuple[dict[str, object], dict[str, TensorInfo]]:
    """Returns the fields and the tensors of the file."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    if self.bytes(4).tobytes() != b'GGUF':
      raise _Damaged('it does not begin with GGUF')
    version = self.number('I')
    if version and version & 0xFFFF == 0:
      raise _Damaged(
        'its byte order is big-endian: gguf-convert-endian of the package gguf turns it'
      )
    if version not in (2, 3):
      raise _Damaged(f'version {version} is not implemented; 2 and 3 are')
    tensors, count = self.count('tensors'), self.count('fields')
    fields: dict[str, object] = {}
    for _ in range(count):
      name = self.text()
      if name in fields:
        raise _Damaged(f'{name} is there twice')
      fields[name] = self.value(self.number('I'))
    alignment = fields.get(_ALIGNMENT, 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
      raise _Damaged(f'{_ALIGNMENT} must be a power of two')
    described: list[tuple[str, Any, tuple[int, ...], int]] = []
    for _ in range(tensors):
      name, dimensions = self.text(), self.number('I')
      if not 1 <= dimensions <= _DIMENSIONS:
        raise _Damaged(f'{name} has {dimensions:,} dimensions')
      shape = tuple(self.number('Q') for _ in range(dimensions))[::-1]  # the innermost is first
      described.append((name, GGMLQuantizationType(self.number('I')), shape, self.number('Q')))
    end = start = -(-self._at // alignment) * alignment
    found: dict[str, TensorInfo] = {}
    for name, kind, shape, offset in described:
      block, size = GGML_QUANT_SIZES[kind]
      if shape[-1] % block:
        raise _Damaged(f'{name} {list(shape)} is not in blocks of {block}')
      if start + offset != end:  # llama.cpp also stores them without gaps
        raise _Damaged(f'{name} is not where the tensor before it ends')
      if name in found:
        raise _Damaged(f'{name} is there twice')
      byte_shape = (*shape[:-1], shape[-1] // block * size)
      if math.prod(byte_shape) > len(self._data) - end:
        raise _Damaged('it ends too early')
      found[name] = TensorInfo(self._data, end, kind, shape, byte_shape)
      end += -(-math.prod(byte_shape) // alignment) * alignment
    return fields, found


class GgufTensors:
  """The tensors of a model in float32; only one tensor is in memory at a time.

  Args:
    path: A GGUF file. If it is a part of a split model, all parts are read.

  Attributes:
    offset: Returns what the file adds to the elements of a tensor, and `read` takes away.

  Raises:
    UserError: A file is not a GGUF file, is damaged or is truncated, or a part is missing.
  """

  def __init__(self, path: pathlib.Path):
    try:
      from gguf import quants
    except ImportError:
      raise UserError(f'GGUF files need the package gguf: {shell.install("weights")}') from None

    self._path = path
    self._dequantize = quants.dequantize
    fields, self._tensors = _opened(path)
    self.fields: Mapping[str, object] = fields
    if fields.get(_COUNT, 1) != 1:
      self.fields, self._tensors = _joined(path, fields)
    self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
    self.offset: Callable[[str], float] = lambda name: 0.0

  def number(self, name: str, default: float | None = None) -> float:
    """Returns a field, an int or a float; raises UserError if it is missing or not a number."""
    value = self.fields.get(name, default)
    if value is None:
      raise UserError(f'{self._path} has no {name}')
    if isinstance(value, bool) or not isinstance(value, (int, float)):
      raise UserError(f'{self._path}: {name} must be a number, not {shortened(value)}')
    return value

  @property
  def kinds(self) -> dict[str, str]:
    """The type of each tensor, as gguf names it: F32, Q8_0 …"""
    return {name: tensor.kind.name for name, tensor in self._tensors.items()}

  def stored(self, name: str) -> np.ndarray:
    """Returns the bytes of a tensor, uint8."""
    tensor = self._tensors[name]
    size = math.prod(tensor.byte_shape)
    return tensor.file[tensor.start : tensor.start + size].reshape(tensor.byte_shape)

  def read(self, name: str) -> np.ndarray:
    tensor = self._tensors[name]
    try:
      values = self._dequantize(self.stored(name), tensor.kind).reshape(tensor.shape)
      offset = self.offset(name)
      return values - np.float32(offset) if offset else values
    except NotImplementedError as e:  # the package gguf does not decode every type of tensor
      raise UserError(f'{self._path}: {name} cannot be read: {e}') from None


def file_of(path: pathlib.Path) -> pathlib.Path:
  """Returns the GGUF file that a path names: the file, or the one model of a folder.

  Raises:
    UserError: The folder holds none, or several that are not the parts of one model.
  """
  if not path.is_dir():
    return path
  found = sorted(path.rglob('*.gguf'))
  parts = [_PART.fullmatch(file.name) for file in found]
  models = {
    (f.parent, m['stem'], m['count']) if m else f for f, m in zip(found, parts, strict=True)
  }
  if len(models) != 1:
    raise UserError(f'{path} holds {len(found)} .gguf files: --path must name one')
  return found[0]


def _opened(path: pathlib.Path) -> tuple[dict[str, object], dict[str, TensorInfo]]:
  check_file(path)
  try:
    return _Header(path).read()
  except (_Damaged, ValueError, OSError) as e:
    raise UserError(f'{path} is not a GGUF file, or is cut short ({e})') from None


def _joined(
  path: pathlib.Path, fields: Mapping[str, object]
) -> tuple[dict[str, object], dict[str, TensorInfo]]:
  """Returns the fields and the tensors of all parts of a model, of which `path` is one."""
  count, match = fields[_COUNT], _PART.fullmatch(path.name)
  if match is None or int(match['count']) != count or fields.get(_NO) != int(match['number']) - 1:
    raise UserError(
      f'{path} is part {shortened(fields.get(_NO))} (from 0) of {shortened(count)} of a model, and '
      f'its name must say so, as in MODEL-00001-of-{match["count"] if match else "00002"}.gguf'
    )
  whole: dict[str, object] = {}
  tensors: dict[str, TensorInfo] = {}
  for i in range(int(match['count'])):
    part = path.with_name(f'{match["stem"]}-{i + 1:05d}-of-{match["count"]}.gguf')
    if not part.exists():
      raise UserError(f'{part} is missing: the model has {int(match["count"])} parts')
    found, stored = _opened(part)
    if (found.get(_NO), found.get(_COUNT)) != (i, count):
      raise UserError(f'{part} says that it is another part ({_NO}, {_COUNT})')
    for name in found.keys() & whole.keys() - {_NO}:
      if found[name] != whole[name]:
        raise UserError(f'{part}: {name}={shortened(found[name])} is not that of the parts before')
    if twice := sorted(stored.keys() & tensors.keys()):
      raise UserError(f'{part}: {twice[0]} is in a part before it, too')
    whole, tensors = found | whole, tensors | stored
  if whole.get(_TENSORS, len(tensors)) != len(tensors):
    raise UserError(
      f'{path}: its parts hold {len(tensors):,} tensors, and {_TENSORS} is '
      f'{shortened(whole[_TENSORS])}'
    )
  return whole, tensors
