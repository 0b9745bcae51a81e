"""Flat tokens: a tokenized dataset stored as one long array, in one of two formats.

- memmap: <path>/<split>/{tokens.bin, seq_starts.bin, meta.json}. tokens.bin is little-endian uint16
  (uint32 if an id needs it), and seq_starts.bin is uint64 [sequences + 1]. meta.json is written
  last, so a folder without it is unfinished. It holds the CRC-32C of tokens.bin, which is checked
  when a dataset is first opened, the vocabulary_fingerprint of the tokenizer, and the number of
  unknown tokens.
- seqax: a zarr v2 group with <split>/encoded_tokens uint32 (id·2, +1 where a sequence starts),
  <split>/seq_starts uint64, and the attribute max_token_id on <split>, with those of the tokenizer
  where paxlite wrote it.
"""

import collections
import json
import os
import pathlib
import zlib
from typing import TYPE_CHECKING, Any, Literal, TypeGuard

import numpy as np

from paxlite.core.errors import UserError
from paxlite.data import checked_files
from paxlite.data.document_encoding import DocumentEncoding, unknown_tokens
from paxlite.data.file_array import FileArray, SortedFileArray
from paxlite.data.records import read_errors
from paxlite.data.rows import RowKind, SequenceStarts, TokenArray, TokenRows
from paxlite.data.tokenizer import open_tokenizer, vocabulary_fingerprint
from paxlite.files.json_files import read_object
from paxlite.files.schemes import is_address, place_of, scheme_of
from paxlite.files.text_files import check_file, fingerprint_of, size_of
from paxlite.files.zarr_chunks import ZarrChunks

if TYPE_CHECKING:
  import zarr

Format = Literal['memmap', 'seqax']

META = 'meta.json'
TOKENS = 'tokens.bin'
_STARTS = 'seq_starts.bin'
_ATTRIBUTES = '.zattrs'  # of a group of zarr
_CACHE_BYTES = 1 << 30
_STARTS_IN_MEMORY = 1 << 20  # more are not read into memory but looked up in the file


class FlatTokenRows(TokenRows):
  """A RowSource over a flat-tokens dataset of either format; tokens are read only when needed.

  Raises UserError if the dataset does not exist, is unfinished, holds no tokens, or is damaged;
  another tokenizer made it; or no id stands before the first token of a document.

  Args:
    path: The dataset's folder.
    split: 'train', 'validation', …
    seq_len: Length of a row.
    start_id: The input before the first token of a document; None: the one that
      DocumentEncoding.first_id says for the tokenizer.
    vocab_path: The tokenizer whose ids the model learns; '': not known.

  Attributes beyond TokenRows':
    fingerprint: A checksum of the tokens.
    tokens_fingerprint: The start id; None if it is 0, or hardly matters.
    tokenizer_fingerprint: That of the tokenizer which made them; None: not known.
    warnings: What a person should know of them, a line each.
  """

  def __init__(
    self,
    path: str,
    split: str,
    seq_len: int,
    rows: RowKind = 'stream',
    start_id: int | None = 0,
    vocab_path: str = '',
  ):
    tokens, seq_starts, max_token_id = open_flat_tokens(path, split)
    name = f'{path}/{split}'
    if not len(tokens):
      raise UserError(f'{name} holds no tokens')
    folder = local_folder(path, split)
    facts = read_object(folder / (META if (folder / META).exists() else _ATTRIBUTES))
    self.tokenizer_fingerprint, unknown = facts.get('tokenizer'), facts.get('unknown_tokens')
    if vocab_path:
      tokenizer = open_tokenizer(vocab_path)
      if self.tokenizer_fingerprint not in (None, vocabulary_fingerprint(tokenizer)):
        raise UserError(
          f'{name} was not tokenized with {tokenizer.path}, so its ids stand for other tokens. '
          'Name the tokenizer that made it, or tokenize the text again'
        )
      start_id = DocumentEncoding(tokenizer, None, start_id).first_id
    elif start_id is None and rows != 'stream':
      raise UserError(
        f'{name}: the id before the first token of a document is unknown: name the tokenizer with '
        'VOCAB_PATH=PATH, or the id with START_ID=ID. To continue a run of an earlier version, '
        'which used 0: START_ID=0 with --accept_changes'
      )
    largest = max(max_token_id, start_id or 0)
    super().__init__(tokens, seq_starts, seq_len, rows, largest, name, start_id)
    # 0 was the start id of all rows once, so that runs which began with it have no such number.
    self.tokens_fingerprint = (start_id or None) if rows != 'stream' else None
    self.warnings = [unknown_tokens(unknown, len(tokens))] if unknown else []
    if isinstance(tokens, FileArray) and not is_address(path):
      check_tokens(folder)
    self.fingerprint = _fingerprint(folder, tokens)


def check_tokens(folder: pathlib.Path) -> None:
  """Compares tokens.bin with the checksum in meta.json, if there is one; old datasets lack it.

  Raises UserError if the file tokens.bin is damaged.
  """
  crc32c = read_object(folder / META).get('crc32c')
  if isinstance(crc32c, int):
    checked_files.check(folder / TOKENS, crc32c)


def open_flat_tokens(path: str, split: str) -> tuple[TokenArray, SequenceStarts, int]:
  """Returns (tokens, seq_starts, max_token_id) of a dataset; the first two are sliceable."""
  folder = local_folder(path, split)
  if not path or not os.path.isdir(folder):
    raise UserError(f'{folder} does not exist: paxlite tokenize makes a flat-tokens dataset')
  is_seqax = (folder / '.zgroup').exists() or (folder / 'encoded_tokens').is_dir()
  tokens: TokenArray
  seq_starts: SequenceStarts
  if is_seqax:
    tokens, seq_starts, max_token_id = _open_seqax(folder)
  else:
    place = f'{path}/{split}' if is_address(path) else str(folder)
    tokens, seq_starts, max_token_id = _open_memmap(folder, place)
  if not len(seq_starts) or int(seq_starts[-1]) != len(tokens):
    raise UserError(
      f'{folder} is unfinished: seq_starts does not end at its {len(tokens):,} tokens'
    )
  return tokens, seq_starts, max_token_id


def local_folder(path: str, split: str) -> pathlib.Path:
  """Returns the folder of a split; of a dataset in a store, it has all but the large files.

  A dataset of seqax in a store is copied as a whole.
  """
  if not is_address(path):
    return pathlib.Path(path) / split
  scheme, place = scheme_of(path), f'{path}/{split}'
  names = scheme.names(place)
  if META in names:
    scheme.copy(f'{place}/{META}')
  elif TOKENS in names:
    raise UserError(f'{place} is unfinished: {META} is missing. Tokenize it again')
  else:
    scheme.copy(place)
  return place_of(place)


def _open_memmap(folder: pathlib.Path, place: str) -> tuple[TokenArray, SequenceStarts, int]:
  """Opens a split whose meta.json is in `folder` and whose arrays are in `place`."""
  if not (folder / META).exists():
    raise UserError(f'{folder} is unfinished: {META} is missing. Tokenize it again')
  meta = read_object(folder / META)
  names = ('token_count', 'sequences', 'max_token_id')
  if meta.get('dtype') not in ('<u2', '<u4') or not all(_is_count(meta.get(n)) for n in names):
    raise UserError(f'{folder / META} is damaged: it needs dtype <u2 or <u4, {", ".join(names)}')
  dtype, (count, sequences, max_token_id) = np.dtype(meta['dtype']), (meta[n] for n in names)
  for name, expected in ((TOKENS, count * dtype.itemsize), (_STARTS, (sequences + 1) * 8)):
    size = 0
    if is_address(place) or os.path.exists(f'{place}/{name}'):
      check_file(f'{place}/{name}')
      size = size_of(f'{place}/{name}')
    if size != expected:
      raise UserError(f'{place}/{name} has {size:,} bytes, but {META} says {expected:,}')
  if count == 0:
    return np.zeros(0, dtype), np.zeros(1, np.uint64), max_token_id
  seq_starts = SortedFileArray(f'{place}/{_STARTS}', '<u8')
  in_memory = len(seq_starts) <= _STARTS_IN_MEMORY
  return (
    FileArray(f'{place}/{TOKENS}', dtype),
    seq_starts[:] if in_memory else seq_starts,
    max_token_id,
  )


def _open_seqax(folder: pathlib.Path) -> tuple['ZarrTokens', np.ndarray, int]:
  import zarr

  _check_zarr_files(folder)
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
      # zarr reads a missing chunk as zeros, without an error
      chunks = -(-array.shape[0] // array.chunks[0])
      if (found := len(list((folder / name).glob('[0-9]*')))) != chunks:
        raise UserError(f'{folder / name} has {found:,} of its {chunks:,} chunks: copy it again')
    starts = group['seq_starts']
    of_starts = ZarrChunks(folder / 'seq_starts')
    for number in range(*of_starts.grid):
      of_starts.check(number)
    return ZarrTokens(group['encoded_tokens'], folder), starts[:], max_token_id


def _check_zarr_files(folder: pathlib.Path) -> None:
  """Raises UserError if a file is a FIFO, a device …, because zarr would read that."""
  for path in (folder, folder / 'encoded_tokens', folder / 'seq_starts'):
    if path.is_dir():
      with os.scandir(path) as entries:
        for entry in entries:
          if not entry.is_file() and path != folder:
            check_file(entry.path)
  for name in ('.zgroup', '.zattrs', '.zmetadata'):
    if (folder / name).exists():
      check_file(folder / name)


def _fingerprint(folder: pathlib.Path, tokens: TokenArray) -> int:
  """Returns a fingerprint of the contents of a dataset, without reading all of them."""
  if isinstance(tokens, FileArray):
    meta = read_object(folder / META)
    names = ('dtype', 'token_count', 'sequences', 'max_token_id', 'crc32c')
    stated = json.dumps([meta.get(name) for name in names])
    place = os.path.dirname(tokens.path)
    looked_at = [f'{place}/{_STARTS}']
    if not _is_count(meta.get('crc32c')):
      looked_at.append(f'{place}/{TOKENS}')
  else:
    with os.scandir(folder / 'encoded_tokens') as entries:
      chunks = sorted((entry.name, entry.stat().st_size) for entry in entries)
    stated = json.dumps([len(tokens), chunks])
    looked_at = [str(folder / 'encoded_tokens' / name) for name, _ in (chunks[0], chunks[-1])]
  return zlib.crc32(json.dumps([stated, *map(fingerprint_of, looked_at)]).encode())


def _is_count(value: object) -> TypeGuard[int]:
  return isinstance(value, int) and not isinstance(value, bool) and value >= 0


class ZarrTokens:
  """The token ids in a zarr array of encoded tokens, with a cache of 1 GiB of decoded chunks."""

  def __init__(self, array: 'zarr.Array', folder: pathlib.Path):
    self._array, self._name = array, str(folder)
    self._chunks = ZarrChunks(folder / 'encoded_tokens')
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
        self._chunks.check(chunk)
        self._cache[chunk] = np.asarray(self._array[start : start + self._chunk]) >> 1
      if len(self._cache) > self._capacity:
        self._cache.popitem(last=False)
    return self._cache[chunk]
