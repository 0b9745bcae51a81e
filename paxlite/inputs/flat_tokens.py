"""Flat tokens: a tokenized dataset as one long array, in two formats on disk.

- memmap: <path>/<split>/{tokens.bin, seq_starts.bin, meta.json}. tokens.bin is little-endian uint16
  (uint32 where an id needs it), seq_starts.bin uint64 [sequences + 1]; meta.json is written last,
  so a folder without it is unfinished.
- seqax: a zarr v2 group with <split>/encoded_tokens uint32 (id·2, +1 where a sequence starts),
  <split>/seq_starts uint64, and the attribute max_token_id on <split>.
"""

import collections
import os
import pathlib
from typing import Any, Literal

import numpy as np

from paxlite.errors import UserError
from paxlite.inputs.files import read_object
from paxlite.inputs.records import read_errors
from paxlite.inputs.rows import RowKind, TokenRows

Format = Literal['memmap', 'seqax']

META = 'meta.json'
_CACHE_BYTES = 1 << 30


class FlatTokenRows(TokenRows):
  """A RowSource over a flat-tokens dataset of either format; nothing is read ahead of use.

  Args:
    path: The dataset's folder.
    split: 'train', 'validation', …
    seq_len: Length of a row.
    rows: Kind of row.

  Raises:
    UserError: there is no such dataset, it is unfinished, or it holds no token.
  """

  def __init__(self, path: str, split: str, seq_len: int, rows: RowKind = 'stream'):
    tokens, seq_starts, max_token_id = open_flat_tokens(path, split)
    super().__init__(tokens, seq_starts, seq_len, rows, max_token_id, name=f'{path}/{split}')
    if not len(tokens):
      raise UserError(f'{path}/{split} holds no tokens')


def open_flat_tokens(path: str, split: str) -> tuple[Any, np.ndarray, int]:
  """Returns (tokens, seq_starts, max_token_id) of a dataset; tokens is sliceable."""
  folder = pathlib.Path(path) / split
  if not path or not os.path.isdir(folder):
    raise UserError(
      f'{folder} is not a flat-tokens dataset: there is no such folder. '
      'python -m paxlite.tools.tokenize makes one'
    )
  is_seqax = (folder / '.zgroup').exists() or (folder / 'encoded_tokens').is_dir()
  tokens, seq_starts, max_token_id = (_open_seqax if is_seqax else _open_memmap)(folder)
  if not len(seq_starts) or int(seq_starts[-1]) != len(tokens):
    raise UserError(
      f'{folder} is unfinished: seq_starts does not end at its {len(tokens):,} tokens'
    )
  return tokens, seq_starts, max_token_id


def _open_memmap(folder: pathlib.Path) -> tuple[np.ndarray, np.ndarray, int]:
  if not (folder / META).exists():
    raise UserError(f'{folder} is unfinished: {META} is missing. Tokenize it again')
  meta = read_object(folder / META)
  names = ('token_count', 'sequences', 'max_token_id')
  if meta.get('dtype') not in ('<u2', '<u4') or not all(_is_count(meta.get(n)) for n in names):
    raise UserError(f'{folder / META} is damaged: it needs dtype <u2 or <u4, {", ".join(names)}')
  dtype, (count, sequences, max_token_id) = np.dtype(meta['dtype']), (meta[n] for n in names)
  for name, expected in (
    ('tokens.bin', count * dtype.itemsize),
    ('seq_starts.bin', (sequences + 1) * 8),
  ):
    size = (folder / name).stat().st_size if (folder / name).exists() else 0
    if size != expected:
      raise UserError(f'{folder / name} has {size:,} bytes and {META} says {expected:,}')
  if count == 0:
    return np.zeros(0, dtype), np.zeros(1, np.uint64), max_token_id
  tokens = np.memmap(folder / 'tokens.bin', dtype, mode='r')
  return tokens, np.memmap(folder / 'seq_starts.bin', np.uint64, mode='r'), max_token_id


def _open_seqax(folder: pathlib.Path) -> tuple['_ZarrTokens', np.ndarray, int]:
  import zarr

  with read_errors(str(folder)):
    group: Any = zarr.open_group(str(folder), mode='r', zarr_format=2)
    max_token_id = group.attrs.get('max_token_id')
    if not _is_count(max_token_id):
      raise UserError(f'{folder} is not a complete seqax dataset: it states no max_token_id')
    for name, dtype in (('encoded_tokens', '<u4'), ('seq_starts', '<u8')):
      if name not in group:
        raise UserError(f'{folder} is not a complete seqax dataset: it has no {name}')
      array = group[name]
      if array.ndim != 1 or array.dtype != dtype:
        raise UserError(f'{folder / name} is {array.dtype} {array.shape} and must be {dtype} [n]')
      # zarr reads a chunk that is not there as zeros
      chunks = -(-array.shape[0] // array.chunks[0])
      if (found := len(list((folder / name).glob('[0-9]*')))) != chunks:
        raise UserError(f'{folder / name} has {found:,} of its {chunks:,} chunks: copy it again')
    return _ZarrTokens(group['encoded_tokens'], str(folder)), group['seq_starts'][:], max_token_id


def _is_count(value: Any) -> bool:
  return isinstance(value, int) and not isinstance(value, bool) and value >= 0


class _ZarrTokens:
  """Token ids of a zarr array of encoded tokens, through a cache of decoded chunks (1 GiB)."""

  def __init__(self, array: Any, name: str):
    self._array, self._name = array, name
    self._chunk = int(array.chunks[0])
    self._cache: collections.OrderedDict[int, np.ndarray] = collections.OrderedDict()
    self._capacity = max(1, _CACHE_BYTES // (4 * self._chunk))

  def __len__(self) -> int:
    return self._array.shape[0]

  def __getitem__(self, where: slice) -> np.ndarray:
    start, stop, _ = where.indices(len(self))
    parts = []
    while start < stop:
      chunk, offset = divmod(start, self._chunk)
      part = self._decoded(chunk)[offset : offset + stop - start]
      parts.append(part)
      start += len(part)
    return np.concatenate(parts) if len(parts) != 1 else parts[0]

  def _decoded(self, chunk: int) -> np.ndarray:
    if chunk in self._cache:
      self._cache.move_to_end(chunk)
    else:
      start = chunk * self._chunk
      with read_errors(self._name):
        self._cache[chunk] = self._array[start : start + self._chunk] >> 1
      if len(self._cache) > self._capacity:
        self._cache.popitem(last=False)
    return self._cache[chunk]
