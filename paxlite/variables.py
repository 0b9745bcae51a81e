"""Variables on disk: a zarr v2 folder each, as Orbax and paxml write them; read by slices.

    state/params.embedding.emb_var/{.zarray, 0.0}
    state/opt_state.1.m.embedding.emb_var/…

A checkpoint of a run, a folder of imported weights and a checkpoint of Pax all look like this.
"""

import dataclasses
import itertools
import json
import math
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from paxlite.errors import UserError

_DTYPES = {'bfloat16': np.dtype(ml_dtypes.bfloat16)}  # what zarr v2 has no code of its own for


@dataclasses.dataclass(frozen=True)
class Variable:
  """One array, on disk or made of others.

  Attributes:
    shape: Of the whole.
    dtype: As stored.
    read: Makes the part at an index (a tuple of slices) as a NumPy array.
  """

  shape: tuple[int, ...]
  dtype: np.dtype
  read: Callable[[tuple[slice, ...]], np.ndarray]

  def whole(self) -> np.ndarray:
    return self.read((slice(None),) * len(self.shape))


def stored_variables(folder: pathlib.Path, separator: str = '/') -> dict[str, Variable]:
  """The variables in a folder by name, `separator` between the parts of one.

  Raises:
    UserError: a variable's description is damaged, or a part of it is missing.
  """
  found = {}
  for path in sorted(folder.iterdir()):
    if (path / '.zarray').is_file():
      found[path.name.replace('.', separator)] = _open(path)
  return found


def write_variable(
  folder: pathlib.Path, name: str, value: np.ndarray, shape: Sequence[int] | None = None
) -> None:
  """Writes a variable whole and uncompressed, in pieces where `value` is a view in another order.

  Args:
    folder: state/ of a checkpoint.
    name: '.' between its parts.
    value: The elements in their order on disk.
    shape: On disk; None: value's.
  """
  shape = list(value.shape if shape is None else shape)
  if math.prod(shape) != value.size:
    raise ValueError(f'{name}: {value.size} elements for {shape}')
  metadata = {
    'chunks': shape,
    'compressor': None,
    'dimension_separator': '.',
    'dtype': 'bfloat16' if value.dtype == ml_dtypes.bfloat16 else value.dtype.str,
    'fill_value': None,
    'filters': None,
    'order': 'C',
    'shape': shape,
    'zarr_format': 2,
  }
  path = folder / name
  path.mkdir(parents=True)
  (path / '.zarray').write_text(json.dumps(metadata))
  with (path / '.'.join('0' * max(len(shape), 1))).open('wb') as f:
    for block in blocks(value):
      f.write(block)


def blocks(value: np.ndarray, size: int = 1 << 24) -> Iterator[bytes]:
  """The elements in C order, about `size` bytes at a time: no copy of the whole is made."""
  rows = value if value.ndim else value[None]
  step = max(1, size * len(rows) // max(value.nbytes, 1))
  for start in range(0, len(rows), step):
    yield rows[start : start + step].tobytes()


def stacked(layers: list[Variable]) -> Variable:
  """[L, …] of L variables of one shape."""

  def read(index: tuple[slice, ...]) -> np.ndarray:
    return np.stack([layer.read(index[1:]) for layer in layers[index[0]]])

  return Variable((len(layers), *layers[0].shape), layers[0].dtype, read)


def layer_of(stack: Variable, i: int) -> Variable:
  """Layer i of a variable [L, …]."""
  read = lambda index: stack.read((slice(i, i + 1), *index))[0]
  return Variable(stack.shape[1:], stack.dtype, read)


def transposed(matrix: Variable) -> Variable:
  """[B, A] of a variable [A, B]."""
  return Variable(matrix.shape[::-1], matrix.dtype, lambda index: matrix.read(index[::-1]).T)


def _open(path: pathlib.Path) -> Variable:
  try:
    metadata = json.loads((path / '.zarray').read_text())
    shape, chunk_shape = tuple(metadata['shape']), tuple(metadata['chunks'])
    dtype = _DTYPES.get(metadata['dtype']) or np.dtype(metadata['dtype'])
    separator = metadata.get('dimension_separator', '.')
  except (ValueError, KeyError, TypeError) as e:
    raise UserError(f'{path}/.zarray is damaged ({e!r})') from None
  plain = metadata.get('compressor') is None and metadata.get('order', 'C') == 'C'
  # zarr reads a chunk that is not there as zeros
  grid = [range(math.ceil(s / c)) for s, c in zip(shape, chunk_shape, strict=True)]
  chunks = {p: path / (separator.join(map(str, p)) or '0') for p in itertools.product(*grid)}
  for chunk in chunks.values():
    if not chunk.is_file():
      raise UserError(f'{chunk} is missing: the variable is incomplete')
    expected = math.prod(chunk_shape) * dtype.itemsize
    if plain and chunk.stat().st_size != expected:
      raise UserError(f'{chunk} has {chunk.stat().st_size:,} bytes and needs {expected:,}')
  read = _mapped(chunks, chunk_shape, dtype) if plain else _decoded(path)
  return Variable(shape, dtype, lambda index: read(_bounds(index, shape)))


_Bounds = list[tuple[int, int]]  # first and one past the last, by dimension


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> _Bounds:
  return [i.indices(n)[:2] for i, n in zip(index, shape, strict=True)]


def _mapped(
  chunks: Mapping[tuple[int, ...], pathlib.Path], chunk_shape: tuple[int, ...], dtype: np.dtype
) -> Callable[[_Bounds], np.ndarray]:
  """Reads out of mapped files: a layer of a stack costs that layer, not its whole chunk."""

  def read(bounds: _Bounds) -> np.ndarray:
    grid = [
      range(start // c, math.ceil(stop / c))
      for (start, stop), c in zip(bounds, chunk_shape, strict=True)
    ]
    whole = np.empty([stop - start for start, stop in bounds], dtype)
    for position in itertools.product(*grid):
      chunk = np.memmap(chunks[position], dtype, 'r', shape=chunk_shape)
      here, there = [], []
      for (start, stop), p, c in zip(bounds, position, chunk_shape, strict=True):
        low, high = max(start, p * c), min(stop, (p + 1) * c)
        here.append(slice(low - start, high - start))
        there.append(slice(low - p * c, high - p * c))
      whole[tuple(here)] = chunk[tuple(there)]
    return whole

  return read


def _decoded(path: pathlib.Path) -> Callable[[_Bounds], np.ndarray]:
  """Reads compressed chunks."""

  def read(bounds: _Bounds) -> np.ndarray:
    import tensorstore as ts

    store: Any = {'driver': 'zarr', 'kvstore': {'driver': 'file', 'path': str(path)}}
    try:
      array = ts.open(store, read=True).result()
      return np.asarray(array[tuple(slice(*b) for b in bounds)].read().result())
    except (ValueError, OSError) as e:
      raise UserError(f'{path} cannot be read: {str(e).splitlines()[0][:200]}') from None

  return read


class UnfinishedFolder:
  """A folder that appears under its name when it is complete, or not at all.

  Args:
    path: Must not exist.

  Raises:
    UserError: it does, or it cannot be made.
  """

  def __init__(self, path: pathlib.Path):
    self._final = path.absolute()
    if os.path.exists(self._final):
      raise UserError(f'{path} exists already: choose another folder, or remove it')
    self.path = self._final.with_name(f'.{self._final.name}.unfinished')

  def __enter__(self) -> pathlib.Path:
    try:
      shutil.rmtree(self.path, ignore_errors=True)
      self.path.mkdir(parents=True)
    except OSError as e:
      raise UserError(f'{self.path} cannot be written: {e.strerror or e}') from None
    return self.path

  def __exit__(self, kind, error, traceback) -> None:
    if kind is None:
      self.path.rename(self._final)
    else:
      shutil.rmtree(self.path, ignore_errors=True)
