"""Cuts one long array of tokens into rows of a fixed length.

Row kinds:
- stream: consecutive windows of the tokens, so that documents follow each other without padding
  (mark their ends with EOS). The input of a row's first target is the token before it.
- packed: the same windows with segment ids and positions, so that no token attends to another
  document. The input is the row shifted right, with the start id at every document start (seqax's
  layout, in which it is 0).
- sequences: one document per row, truncated or padded to the row's length.
"""

import dataclasses
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np

from paxlite.core.errors import UserError
from paxlite.data.base import Batch, blanked
from paxlite.data.places import Place
from paxlite.data.records import canonical

if TYPE_CHECKING:
  from paxlite.data.file_array import SortedFileArray

SequenceStarts: TypeAlias = 'np.ndarray | SortedFileArray'

RowKind = Literal['stream', 'packed', 'sequences']


class TokenArray(Protocol):
  """Token ids [n] in memory or in a file."""

  def __len__(self) -> int: ...

  def __getitem__(self, where: slice, /) -> np.ndarray: ...


@runtime_checkable
class RemoteArray(Protocol):
  """An array that may be far away, and fetches values before they are read."""

  def will_read(self, parts: Iterable[tuple[int, int]]) -> None:
    """Begins to fetch values that will be read soon: (first, count) of each part."""
    ...


@dataclasses.dataclass
class TokenRows:
  """A RowSource over tokens in memory or in a file."""

  # ids [token_count] of any unsigned type, as an array or another sliceable object
  tokens: TokenArray
  # first index of each document, then token_count [sequences + 1]; an array, or a SortedFileArray
  seq_starts: SequenceStarts
  seq_len: int  # length T of a row
  rows: RowKind  # kind of row; the module's docstring describes the kinds
  max_token_id: int  # the largest id in tokens, as the dataset states it
  name: str = 'tokens'  # name of the dataset, for messages
  # The input before the first token of a document; None: not known, which stream rows allow. The
  # first row of these then follows the last token of the data.
  start_id: int | None = 0
  # documents whose tokens are padding; see left_out.py
  left_out = frozenset[int]()  # no field: an input is made without it

  def __len__(self) -> int:
    if self.rows == 'sequences':
      return len(self.seq_starts) - 1
    return -(-len(self.tokens) // self.seq_len)

  @property
  def read_ahead(self) -> int:
    """How many batches `will_read` should know of before they are read."""
    return getattr(self.tokens, 'read_ahead', 0)

  def will_read(self, indices: np.ndarray) -> None:
    """Begins to fetch the tokens of rows `indices` [b]."""
    assert isinstance(self.tokens, RemoteArray), 'only such tokens have a read_ahead'
    if self.rows == 'sequences':
      if isinstance(self.seq_starts, RemoteArray):  # all at once, before one is waited for
        self.seq_starts.will_read((i, 2) for i in indices.tolist())
      bounds = [(int(self.seq_starts[i]), int(self.seq_starts[i + 1])) for i in indices.tolist()]
      counts = [min(max(end - first, 0), self.seq_len) for first, end in bounds]
      firsts = [first for first, _ in bounds]
      self.tokens.will_read(zip(firsts, counts, strict=True))
    else:
      firsts = np.maximum(indices * self.seq_len - 1, 0)
      self.tokens.will_read((first, self.seq_len + 1) for first in firsts.tolist())

  def read(self, indices: np.ndarray) -> Batch:
    """Returns rows `indices` [b] as a batch.

    Raises UserError if a token is larger than max_token_id, or seq_starts are out of order.
    """
    batch = self._sequences(indices) if self.rows == 'sequences' else self._stream(indices)
    # Compared as unsigned, because an id beyond int32 has become negative. Inputs after the first
    # need no check, because they are also targets.
    looked_at = batch['labels'], batch['ids'][:, :1]
    largest = max(int(part.view(np.uint32).max()) for part in looked_at)
    stated = f'token id {largest} and states {self.max_token_id} as its largest'
    self._check(largest <= self.max_token_id, stated)
    if self.rows == 'packed':
      batch = self._with_segments(batch, indices)
    elif self.rows == 'sequences':
      batch['ids'][:, 0] = self._start
    else:
      batch['ids'][indices == 0, 0] = self._start
    if self.left_out:
      return blanked(batch, np.isin(self._origins(indices)[..., 0], list(self.left_out)))
    return batch

  def leave_out(self, places: Sequence[Place]) -> list[Place]:
    """Makes padding of the documents that are among `places`; returns those that are."""
    wanted = {(canonical(p.source), p.record): p for p in places}
    own = self._keys({source for source, _ in wanted})
    found = [(wanted[key], number) for key, number in own if key in wanted]
    self.left_out |= frozenset(number for _, number in found)
    return list(dict.fromkeys(place for place, _ in found))

  def _keys(self, sources: Container[str]) -> Iterator[tuple[tuple[str, int | None], int]]:
    """Yields source and record of the documents that are in one of these sources, and the number.

    Several documents may have the same source and record.
    """
    name = canonical(self.name)
    if name in sources:
      yield from (((name, i), i) for i in range(self.num_documents))

  @property
  def _start(self) -> int:
    if self.start_id is not None:
      return self.start_id
    assert self.rows == 'stream', 'the other kinds need a start id'
    return int(self.tokens[len(self.tokens) - 1 : len(self.tokens)][0])

  @property
  def origin_starts(self) -> SequenceStarts:
    """The first token of each document that origins name, then token_count [documents + 1]."""
    return self.seq_starts

  @property
  def num_documents(self) -> int:
    return len(self.origin_starts) - 1

  def origins(self, indices: np.ndarray) -> np.ndarray:
    """Returns (document, token) of each target of rows `indices`, int64 [b, T, 2]; −1: padding."""
    found = self._origins(indices)
    if self.left_out:
      found[np.isin(found[..., 0], list(self.left_out))] = -1
    return found

  def _origins(self, indices: np.ndarray) -> np.ndarray:
    T = self.seq_len
    found = np.full((len(indices), T, 2), -1, np.int64)
    for r, index in enumerate(indices.tolist()):
      if self.rows == 'sequences':
        length = min(self.length_of(index), T)
        found[r, :length] = np.stack([np.full(length, index), np.arange(length)], axis=1)
        continue
      at = np.arange(index * T, min((index + 1) * T, len(self.tokens)))
      # With another dtype than that of the starts, NumPy would convert all of them.
      ends = np.array([at[0] + 1, at[-1] + 1]).astype(self.origin_starts.dtype)
      first, last = (int(i) - 1 for i in self.origin_starts.searchsorted(ends))
      starts = np.asarray(self.origin_starts[first : last + 1]).astype(np.int64)
      document = starts.searchsorted(at, side='right') - 1
      found[r, : len(at)] = np.stack([first + document, at - starts[document]], axis=1)
    return found

  def place_of(self, document: int) -> Place:
    start = int(self.origin_starts[document])
    detail = f'document {document}, which begins at token {start:,}'
    why = 'tokens do not keep the names of the files that they were'
    return Place(self.name, document, detail, why)

  def length_of(self, document: int) -> int:
    return int(self.origin_starts[document + 1]) - int(self.origin_starts[document])

  def _stream(self, indices: np.ndarray) -> Batch:
    T, count = self.seq_len, len(self.tokens)
    window = np.zeros((len(indices), T + 1), np.int32)  # one token of context, then the targets
    weights = np.ones((len(indices), T), np.float32)
    for r, start in enumerate((indices * T).tolist()):
      end = min(start + T, count)
      context = min(start, 1)
      window[r, 1 - context : 1 + end - start] = self.tokens[start - context : end]
      if end < start + T:
        weights[r, end - start :] = 0
    return {'ids': window[:, :-1], 'labels': window[:, 1:], 'weights': weights}

  def _with_segments(self, batch: Batch, indices: np.ndarray) -> Batch:
    T = self.seq_len
    is_start = np.tile(np.arange(T) == 0, (len(indices), 1))
    # With another dtype than that of seq_starts, NumPy would convert all of seq_starts.
    row_starts = (indices * T).astype(self.seq_starts.dtype)
    first = self.seq_starts.searchsorted(row_starts)
    last = self.seq_starts.searchsorted(row_starts + self.seq_starts.dtype.type(T))
    for r in range(len(indices)):
      inside = self.seq_starts[first[r] : last[r]].astype(np.int64) - int(indices[r]) * T
      self._check(((inside >= 0) & (inside < T)).all(), 'documents in no order')
      is_start[r, inside] = True
    position = np.arange(T, dtype=np.int32)
    return {
      'ids': np.where(is_start, np.int32(self._start), batch['ids']),
      'labels': batch['labels'],
      'weights': batch['weights'],
      'segment_ids': np.cumsum(is_start, axis=1, dtype=np.int32) * (batch['weights'] > 0),
      'segment_pos': position - np.maximum.accumulate(np.where(is_start, position, 0), axis=1),
    }

  def _sequences(self, indices: np.ndarray) -> Batch:
    T = self.seq_len
    labels = np.zeros((len(indices), T), np.int32)
    weights = np.zeros((len(indices), T), np.float32)
    for r, index in enumerate(indices):
      start, end = int(self.seq_starts[index]), int(self.seq_starts[index + 1])
      self._check(start <= end <= len(self.tokens), 'documents in no order')
      length = min(end - start, T)
      labels[r, :length] = self.tokens[start : start + length]
      weights[r, :length] = 1
    return {
      'ids': np.pad(labels[:, :-1], ((0, 0), (1, 0))), 'labels': labels, 'weights': weights,
      'segment_ids': weights.astype(np.int32),
      'segment_pos': np.broadcast_to(np.arange(T, dtype=np.int32), labels.shape),
    }  # fmt: skip

  def _check(self, good: bool | np.bool, has: str) -> None:
    if not good:
      raise UserError(f'{self.name} has {has}: it is damaged; tokenize it again')
