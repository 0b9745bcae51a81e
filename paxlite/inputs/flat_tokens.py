"""Flat tokens: a tokenized dataset as one long array, in two formats on disk.

- memmap: <path>/<split>/{tokens.bin, seq_starts.bin, meta.json}. tokens.bin is little-endian uint16
  (uint32 where an id needs it), seq_starts.bin uint64 [sequences + 1]; meta.json is written last,
  so a folder without it is unfinished.
- seqax: a zarr v2 group with <split>/encoded_tokens uint32 (id·2, +1 where a sequence starts),
  <split>/seq_starts uint64, and the attribute max_token_id on <split>.
"""

import collections
import json
import os
import pathlib
import re
import shutil
from typing import Any, Literal

import numpy as np

from paxlite.errors import UserError
from paxlite.inputs.rows import RowKind, TokenRows

Format = Literal['memmap', 'seqax']

_META = 'meta.json'
_CHUNK = 1 << 20  # tokens of a zarr chunk
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
  if not (folder / _META).exists():
    raise UserError(f'{folder} is unfinished: {_META} is missing. Tokenize it again')
  try:
    meta = json.loads((folder / _META).read_text())
    dtype, count, sequences = np.dtype(meta['dtype']), meta['token_count'], meta['sequences']
    max_token_id = int(meta['max_token_id'])
  except (ValueError, KeyError, TypeError) as e:
    raise UserError(f'{folder / _META} is damaged: {e!r}') from None
  for name, expected in (
    ('tokens.bin', count * dtype.itemsize),
    ('seq_starts.bin', (sequences + 1) * 8),
  ):
    size = (folder / name).stat().st_size if (folder / name).exists() else 0
    if size != expected:
      raise UserError(f'{folder / name} has {size:,} bytes and {_META} says {expected:,}')
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


class Writer:
  """Writes one split of a dataset, document by document; `close` makes it complete.

  Args:
    path: The dataset's folder.
    split: Name of the split.
    vocab_size: Chooses uint16 or uint32 (memmap).
    format: See the module.

  Raises:
    UserError: the split is there already, or its folder cannot be made.
  """

  def __init__(self, path: str, split: str, vocab_size: int, format: Format = 'memmap'):
    self._folder = pathlib.Path(path) / split
    if not re.fullmatch('[A-Za-z0-9._-]+', split) or not split.strip('.'):
      raise UserError(f'{split!r} is no name of a split: use letters, digits, ., _ and -')
    if self._folder.exists() and (not self._folder.is_dir() or any(self._folder.iterdir())):
      raise UserError(f'{self._folder} exists: choose another --output or remove it')
    try:
      self._folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
      raise UserError(f'{self._folder} cannot be made: {e.strerror}') from None
    self._starts = [0]
    self._max = 0
    self._format = format
    self._pending: list[np.ndarray] = []
    self._pending_tokens = 0
    self._dtype = np.dtype('<u2' if vocab_size <= 1 << 16 else '<u4')
    self._array: Any = None
    self._file: Any = None
    if format == 'seqax':
      self._array = self._create_seqax(path)
    else:
      self._file = (self._folder / 'tokens.bin').open('wb')

  @property
  def token_count(self) -> int:
    return self._starts[-1]

  def write(self, tokens: np.ndarray) -> None:
    """Appends one document's ids [n]; an empty document is left out."""
    if not len(tokens):
      return
    self._max = max(self._max, int(tokens.max()))
    self._starts.append(self._starts[-1] + len(tokens))
    if self._file is not None:
      self._file.write(tokens.astype(self._dtype).tobytes())
      return
    encoded = tokens.astype(np.uint32) * 2
    encoded[0] += 1
    self._pending.append(encoded)
    self._pending_tokens += len(tokens)
    if self._pending_tokens >= _CHUNK:
      self._flush(whole_chunks=True)

  def close(self) -> None:
    starts = np.array(self._starts, '<u8')
    if self._file is not None:
      self._file.close()
      (self._folder / 'seq_starts.bin').write_bytes(starts.tobytes())
      meta = {
        'format': 'paxlite flat tokens 1',
        'dtype': self._dtype.str,
        'token_count': self.token_count,
        'sequences': len(starts) - 1,
        'max_token_id': self._max,
      }
      unfinished = self._folder / (_META + '.tmp')
      unfinished.write_text(json.dumps(meta, indent=2) + '\n')
      os.replace(unfinished, self._folder / _META)
      return
    import numcodecs

    self._flush(whole_chunks=False)
    self._group.create_array(
      'seq_starts',
      data=starts,
      chunks=(max(1, min(len(starts), _CHUNK)),),
      filters=[numcodecs.Delta(dtype='<u8')],
      compressors=_blosc(),
    )
    self._group.attrs['max_token_id'] = self._max

  def abort(self) -> None:
    """Removes what was written of the split."""
    if self._file is not None:
      self._file.close()
    shutil.rmtree(self._folder)

  def _create_seqax(self, path: str) -> Any:
    import zarr

    root: Any = zarr.open_group(path, mode='a', zarr_format=2)
    self._group: Any = root.create_group(self._folder.name)
    return self._group.create_array(
      'encoded_tokens', shape=(0,), dtype='<u4', chunks=(_CHUNK,), compressors=_blosc()
    )

  def _flush(self, whole_chunks: bool) -> None:
    if not self._pending:
      return
    data = np.concatenate(self._pending)
    keep = len(data) % _CHUNK if whole_chunks else 0  # a chunk is compressed once
    done = data[: len(data) - keep]
    written = self._array.shape[0]
    self._array.resize((written + len(done),))
    self._array[written:] = done
    self._pending, self._pending_tokens = [data[len(done) :]], keep


def _blosc() -> Any:
  import numcodecs

  return numcodecs.Blosc(cname='lz4', clevel=5, shuffle=numcodecs.Blosc.BITSHUFFLE)
