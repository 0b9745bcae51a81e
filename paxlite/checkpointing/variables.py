"""Variables on disk: one zarr v2 folder each, as Orbax and paxml write them; read by slices.

    state/params.embedding.emb_var/{.zarray, 0.0}
    state/opt_state.1.m.embedding.emb_var/…

A checkpoint of a run, a folder of imported weights and a Pax checkpoint all have this layout.
"""

import dataclasses
import itertools
import json
import math
import os
import pathlib
import re
import zlib
from collections.abc import Callable, Iterator, Sequence

import ml_dtypes
import numpy as np

from paxlite.checkpointing.checksums import Sum
from paxlite.core.errors import UserError
from paxlite.files.zarr_chunks import EXTENDED, STATING, ZarrChunks


@dataclasses.dataclass(frozen=True)
class Variable:
  """One array, stored on disk or computed from other variables."""

  shape: tuple[int, ...]  # shape of the full array
  dtype: np.dtype  # dtype on disk
  # function that reads the part at an index (a tuple of slices) as a NumPy array
  read: Callable[[tuple[slice, ...]], np.ndarray]

  def whole(self) -> np.ndarray:
    return self.read((slice(None),) * len(self.shape))


def stored_variables(folder: pathlib.Path, separator: str = '/') -> dict[str, Variable]:
  """Returns the variables in a folder by name; `separator` joins the parts of a name.

  Raises:
    UserError: A variable's description is damaged, or a chunk is missing or has a wrong size.
  """
  found = {}
  for path in sorted(folder.iterdir()):
    if (path / '.zarray').is_file():
      found[path.name.replace('.', separator)] = _open(path)
  return found


def write_variable(
  folder: pathlib.Path, name: str, value: np.ndarray, shape: Sequence[int] | None = None
) -> tuple[str, Sum]:
  """Writes a variable as one uncompressed chunk.

  The chunk is written in blocks, so that a transposed view is never copied completely.

  Args:
    folder: The folder state/ of a checkpoint.
    name: The name, with '.' between its parts.
    value: The elements in the order that they have on disk.
    shape: The shape on disk; None means the shape of `value`.

  Returns:
    The path of the chunk in the checkpoint, and its size and CRC-32, for write_checksums.
  """
  shape = list(value.shape if shape is None else shape)
  if math.prod(shape) != value.size:
    raise ValueError(f'{name}: {value.size} elements for {shape}')
  metadata = {
    'chunks': shape, 'compressor': None, 'dimension_separator': '.',
    'dtype': 'bfloat16' if value.dtype == ml_dtypes.bfloat16 else value.dtype.str,
    'fill_value': None, 'filters': None, 'order': 'C', 'shape': shape, 'zarr_format': 2,
  }  # fmt: skip
  path = folder / name
  path.mkdir(parents=True)
  (path / '.zarray').write_text(json.dumps(metadata))
  chunk, total = path / '.'.join('0' * max(len(shape), 1)), 0
  with chunk.open('wb') as f:
    for block in blocks(value):
      f.write(block)
      total = zlib.crc32(block, total)
  return chunk.relative_to(folder.parent).as_posix(), (value.nbytes, total)


def blocks(value: np.ndarray) -> Iterator[memoryview]:
  """Yields the elements in C order, some megabytes at a time, without a full copy."""
  rows = value if value.ndim else value[None]
  # What is there in this order stays in a core's cache until it is written. A transposed view is
  # copied in larger blocks, whose rows use all of what is read from memory.
  size = 1 << (20 if rows.flags.c_contiguous else 24)
  step = max(1, size * len(rows) // max(value.nbytes, 1))
  for start in range(0, len(rows), step):
    yield np.ascontiguousarray(rows[start : start + step]).reshape(-1).view(np.uint8).data


def stacked(layers: list[Variable]) -> Variable:
  """Returns one variable [L, …] of L variables with equal shapes."""

  def read(index: tuple[slice, ...]) -> np.ndarray:
    return np.stack([layer.read(index[1:]) for layer in layers[index[0]]])

  return Variable((len(layers), *layers[0].shape), layers[0].dtype, read)


def layer_of(stack: Variable, i: int) -> Variable:
  """Returns layer i of a variable [L, …]."""
  read = lambda index: stack.read((slice(i, i + 1), *index))[0]
  return Variable(stack.shape[1:], stack.dtype, read)


def transposed(matrix: Variable) -> Variable:
  """Returns the transpose [B, A] of a variable [A, B]."""
  return Variable(matrix.shape[::-1], matrix.dtype, lambda index: matrix.read(index[::-1]).T)


def _open(path: pathlib.Path) -> Variable:
  """Returns a variable after checking its files against its description; reads no elements."""
  array = ZarrChunks(path, (*STATING, 'gzip', 'zlib'))
  if array.filters:
    raise UserError(f'{path} has filters, which are not supported')
  count, present = math.prod(array.grid), sum(len(files) for _, _, files in os.walk(path))
  if count >= present:  # .zarray is counted too.
    missing = count - present + 1
    raise UserError(f'{path} is incomplete: {missing:,} of {count:,} chunks are missing')
  for position in itertools.product(*map(range, array.grid)):
    array.check(*position)
  dtype = np.dtype(getattr(ml_dtypes, array.dtype) if array.dtype in EXTENDED else array.dtype)
  if array.codec is None and array.order == 'C':  # only used parts are read
    return Variable(array.shape, dtype, lambda index: _mapped(array, dtype, index))
  return Variable(array.shape, dtype, lambda index: _decompressed(path, index))


def _mapped(array: ZarrChunks, dtype: np.dtype, index: tuple[slice, ...]) -> np.ndarray:
  """Reads the part of an array at an index from its chunks, which are not compressed."""
  bounds = [i.indices(n)[:2] for i, n in zip(index, array.shape, strict=True)]
  grid = [
    range(start // c, math.ceil(stop / c))
    for (start, stop), c in zip(bounds, array.chunks, strict=True)
  ]
  part = np.empty([stop - start for start, stop in bounds], dtype)
  for position in itertools.product(*grid):
    chunk = np.memmap(array.path(*position), dtype, 'r', shape=array.chunks)
    here, there = [], []
    for (start, stop), p, c in zip(bounds, position, array.chunks, strict=True):
      low, high = max(start, p * c), min(stop, (p + 1) * c)
      here.append(slice(low - start, high - start))
      there.append(slice(low - p * c, high - p * c))
    part[tuple(here)] = chunk[tuple(there)]
  return part


def _decompressed(path: pathlib.Path, index: tuple[slice, ...]) -> np.ndarray:
  """Reads the part of an array at an index whose chunks are decompressed as a whole."""
  import tensorstore

  spec = {'driver': 'zarr', 'kvstore': {'driver': 'file', 'path': f'{path}/'}}
  try:
    return tensorstore.open(spec, read=True).result()[index].read().result()
  except (ValueError, MemoryError) as e:
    text = str(e).partition('\n')[0]
    if found := re.search('Error reading local file "(.+?)": (.*)', text):  # of one chunk
      path, text = pathlib.Path(found[1]), found[2]
    raise UserError(f'{path} cannot be read: {text[:200]}') from None
