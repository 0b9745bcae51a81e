"""Flat tokens: a tokenized dataset as one long array, in two formats on disk.

- memmap: <path>/<split>/{tokens.bin, seq_starts.bin, meta.json}. tokens.bin is little-endian uint16
  (uint32 where an id needs it), seq_starts.bin uint64 [sequences + 1]; meta.json is written last,
  so a folder without it is unfinished.
- seqax: a zarr v2 group with <split>/encoded_tokens uint32 (id·2, +1 where a sequence starts),
  <split>/seq_starts uint64, and the attribute max_token_id on <split>.
"""

import collections
import json
import pathlib
from typing import Any, Literal

import numpy as np

from paxlite.errors import UserError
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
  if not path or not folder.is_dir():
    raise UserError(
      f'{folder} is not a flat-tokens dataset: there is no such folder. '
      'python -m paxlite.tools.tokenize makes one'
    )
  if (folder / '.zgroup').exists() or (folder / 'encoded_tokens').is_dir():
    return _open_seqax(folder)
  return _open_memmap(folder)


def _open_memmap(folder: pathlib.Path) -> tuple[np.ndarray, np.ndarray, int]:
  if not (folder / META).exists():
    raise UserError(f'{folder} is unfinished: {META} is missing. Tokenize it again')
  try:
    meta = json.loads((folder / META).read_text())
    dtype, count, sequences = np.dtype(meta['dtype']), meta['token_count'], meta['sequences']
    max_token_id = int(meta['max_token_id'])
  except (ValueError, KeyError, TypeError) as e:
    raise UserError(f'{folder / META} is damaged: {e!r}') from None
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

  try:
    group: Any = zarr.open_group(str(folder), mode='r')
    max_token_id = int(group.attrs['max_token_id'])
    tokens = _ZarrTokens(group['encoded_tokens'])
    seq_starts = np.asarray(group['seq_starts'][:])
  except (KeyError, ValueError, OSError) as e:
    raise UserError(f'{folder} is not a complete seqax dataset: {e!r}') from None
  if not len(seq_starts) or int(seq_starts[-1]) != len(tokens):
    raise UserError(
      f'{folder} is unfinished: seq_starts does not end at its {len(tokens):,} tokens'
    )
  return tokens, seq_starts, max_token_id


class _ZarrTokens:
  """Token ids of a zarr array of encoded tokens, through a cache of decoded chunks (1 GiB)."""

  def __init__(self, array: Any):
    self._array = array
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
      self._cache[chunk] = self._array[start : start + self._chunk] >> 1
      if len(self._cache) > self._capacity:
        self._cache.popitem(last=False)
    return self._cache[chunk]
