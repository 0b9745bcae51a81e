"""The origins of a batch's tokens: the record or document of each, and its position there.

`traced` returns an input that yields the very batches of another one, with one more array:

  origin    int64 [b, T, 5], the columns for each target; −1 where nothing is known

The places that error messages name, as corpus.jsonl:17, are also the names of records here. A
source that cannot say where its tokens come from says why, in the field `unknown` of a Place.
"""

import collections
import copy
import dataclasses
import enum
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np

from paxlite.data.base import Batch, Input, RowInput, RowSource
from paxlite.data.mixture import MixtureInput
from paxlite.data.places import Place
from paxlite.data.stream_rows import Example, Row
from paxlite.data.streams import Dataset, StreamInput

ORIGIN = 'origin'


class Column(enum.IntEnum):
  """The last axis of `origin`.

  INPUT is the number of the input in a mixture, DATASET that in a stream of several, SHARD the part
  of the dataset, and DOCUMENT the number in it. TOKEN counts the tokens of the document from 0.
  """

  INPUT = 0
  DATASET = 1
  SHARD = 2
  DOCUMENT = 3
  TOKEN = 4


Key = tuple[int, int, int, int]  # all but TOKEN: identifies a document of an input


class DocumentIndex(Protocol):
  """A source's facts about one of its documents."""

  def place_of(self, document: int) -> Place: ...

  def length_of(self, document: int) -> int: ...


@runtime_checkable
class TracedSource(DocumentIndex, Protocol):
  """A RowSource that knows the documents of its rows."""

  num_documents: int  # how many there are

  def origins(self, indices: np.ndarray) -> np.ndarray:
    """Returns (document, token) of each target of rows `indices`, int64 [b, T, 2]; −1: padding."""
    ...


@runtime_checkable
class TracedDataset(Protocol):
  """A Dataset of a stream that knows its records."""

  def record_of(self, shard: int, shuffle: bool, seed: int | None, number: int) -> int:
    """Returns the number in its shard of the record that `examples` calls `number`."""
    ...

  def place_of(self, shard: int, record: int) -> Place: ...


def traced(data: Input) -> Input:
  """Returns an input with the batches of `data`, and their origins.

  Batches of an input that paxlite does not know have none.
  """
  return _traced(data, 0)


def _traced(data: Input, number: int) -> Any:
  if isinstance(data, MixtureInput):
    whole = copy.copy(data)
    whole.inputs = [_traced(each, i) for i, each in enumerate(data.inputs)]
    for name in ('_streams', '_positions'):  # what was computed of the other inputs
      vars(whole).pop(name, None)
    return whole
  if isinstance(data, StreamInput):
    return _TracedStream(data, number)
  if isinstance(data, RowInput):
    return dataclasses.replace(data, source=_TracedRows(data.source, number))
  return data


class _TracedRows:
  """A RowSource with the rows of another one, and their origins."""

  def __init__(self, source: RowSource, number: int):
    self.source, self._number = source, number

  def __len__(self) -> int:
    return len(self.source)

  def __getattr__(self, name: str) -> Any:
    return getattr(vars(self)['source'], name)

  def read(self, indices: np.ndarray) -> Batch:
    batch = self.source.read(indices)
    found = np.full((*batch['ids'].shape, len(Column)), -1, np.int64)
    if isinstance(self.source, TracedSource):
      known = self.source.origins(indices)
      found[..., : Column.DOCUMENT] = self._number, 0, 0
      found[..., Column.DOCUMENT :] = known
      found[known[..., 0] < 0] = -1
    return batch | {ORIGIN: found}


class _TracedStream(StreamInput):
  """A StreamInput with the rows of another one, and their origins."""

  def __init__(self, data: StreamInput, number: int):
    super().__init__(data.source, data.seq_len, data.batch_size, data.rows, data.seed, data.shuffle)
    self._number = number

  def rows_of(
    self, dataset: Any, shard: int, epoch: int | None, example: int = 0, offset: int = 0
  ) -> Iterator[Row]:
    number = next(i for i, known in enumerate(self.source.datasets) if known is dataset)
    most = self.seq_len if self.rows == 'packed' else None
    noted = _Noted(dataset, (self._number, number), offset, most)
    for row, after in super().rows_of(noted, shard, epoch, example, offset):
      yield {**row, ORIGIN: noted.origins(row)}, after


class _Noted:
  """A dataset that records the yielded examples until rows are made of them.

  Args:
    names: The number of the input, and of the dataset in it.
    offset: The token of the first example at which rows begin.
    most: The tokens to which an example is cut; None: it is not.
  """

  def __init__(
    self, dataset: Dataset, names: tuple[int, int], offset: int = 0, most: int | None = None
  ):
    self._dataset, self._names, self._offset, self._most = dataset, names, offset, most
    self._waiting: collections.deque[tuple[int, int, int, int]] = collections.deque()

  def examples(
    self, shard: int, shuffle: bool, seed: int | None, start: int
  ) -> Iterator[tuple[int, Example]]:
    for number, example in self._dataset.examples(shard, shuffle, seed, start):
      record = number
      if isinstance(self._dataset, TracedDataset):
        record = self._dataset.record_of(shard, shuffle, seed, number)
      first = self._offset if number == start else 0
      self._waiting.append((shard, record, first, len(example.ids[: self._most])))
      yield number, example

  def origins(self, row: Batch) -> np.ndarray:
    """Returns the origins [T, 5] of the next row that was made of the examples."""
    found = np.full((len(row['labels']), len(Column)), -1, np.int64)
    count, at = int((row['segment_ids'] > 0).sum()), 0
    while at < count:
      shard, record, first, length = self._waiting.popleft()
      here = min(length - first, count - at)
      found[at : at + here, : Column.TOKEN] = *self._names, shard, record
      found[at : at + here, Column.TOKEN] = np.arange(first, first + here)
      at += here
      if first + here < length:
        self._waiting.appendleft((shard, record, first + here, length))
    return found


def place_of(data: Input, key: Key) -> Place:
  """Returns the location of a document of an input.

  Args:
    data: The input, which is not traced itself.
    key: The fields of its origin before TOKEN; −1 if it has none.
  """
  each = _input_of(data, key)
  source = getattr(each, 'source', each)
  if key[Column.DOCUMENT] < 0:
    why = getattr(source, 'why_untraced', 'its source does not name the origin of its sequences')
    return Place(str(getattr(each, 'name', '')), unknown=why)
  if isinstance(each, StreamInput):
    dataset = each.source.datasets[key[Column.DATASET]]
    if isinstance(dataset, TracedDataset):
      return dataset.place_of(key[Column.SHARD], key[Column.DOCUMENT])
    detail = f'shard {key[Column.SHARD]}, example {key[Column.DOCUMENT]} in the order of reading'
    return Place(dataset.name, detail=detail, unknown='the dataset does not name its records')
  return cast(TracedSource, source).place_of(key[Column.DOCUMENT])


def length_of(data: Input, key: Key) -> int | None:
  """Returns how many tokens a document has as a target; None if only reading it tells."""
  source = getattr(_input_of(data, key), 'source', None)
  return source.length_of(key[Column.DOCUMENT]) if isinstance(source, TracedSource) else None


def names_records(data: Input, key: Key) -> bool:
  """Returns whether a document is the same one wherever this key comes up."""
  each = _input_of(data, key)
  if key[Column.DOCUMENT] < 0 or not isinstance(each, StreamInput):
    return key[Column.DOCUMENT] >= 0
  dataset = each.source.datasets[key[Column.DATASET]]
  return isinstance(dataset, TracedDataset) and getattr(dataset, 'names_records', True)


def num_documents(data: Input) -> int | None:
  """Returns how many documents training may read; None if that is not known."""
  if isinstance(data, MixtureInput):
    counts = [num_documents(each) for each in data.inputs]
    return None if None in counts else sum(cast(Sequence[int], counts))
  source = getattr(data, 'source', None)
  if isinstance(data, StreamInput):
    counts = [_count(dataset) for dataset in data.source.datasets]
    return None if None in counts else sum(cast(Sequence[int], counts))
  return source.num_documents if isinstance(source, TracedSource) else None


def _count(dataset: Dataset) -> int | None:
  count = getattr(dataset, 'count_documents', None)
  return None if count is None else count()


def _input_of(data: Input, key: Key) -> Any:
  return data.inputs[max(0, key[Column.INPUT])] if isinstance(data, MixtureInput) else data


@dataclasses.dataclass(frozen=True)
class DocumentSpan:
  """Targets of a row that follow each other in one document: positions start … end − 1."""

  key: Key  # the document; its numbers are −1 if it is not known
  token: int | None  # the number of the first token in its document; None if it is not known
  start: int  # the first position in the row
  end: int  # the position behind the last one
  segment: int | None  # the segment of a packed row; None: the row has none


def pieces(batch: Batch, row: int) -> list[DocumentSpan]:
  """Returns the pieces of a row of a traced batch, without its padding."""
  ids, weights = batch['ids'][row], batch['weights'][row]
  origin = batch[ORIGIN][row] if ORIGIN in batch else np.full((len(ids), len(Column)), -1, np.int64)
  segments = batch['segment_ids'][row] if 'segment_ids' in batch else None
  learned = np.flatnonzero(weights > 0)
  end = len(ids) if not len(learned) else int(learned[-1]) + 1
  is_text = origin[:, Column.DOCUMENT] >= 0
  if segments is not None:
    is_text = is_text | (segments > 0)
  elif not is_text.any():
    is_text = np.arange(len(ids)) < end
  new = np.ones(len(ids), bool)
  known = origin[1:, Column.TOKEN] >= 0
  new[1:] = (
    (origin[1:, : Column.TOKEN] != origin[:-1, : Column.TOKEN]).any(1)
    | (known & (origin[1:, Column.TOKEN] != origin[:-1, Column.TOKEN] + 1))
    | (is_text[1:] != is_text[:-1])
  )
  if segments is not None:
    new[1:] |= segments[1:] != segments[:-1]
  starts = [*np.flatnonzero(new).tolist(), len(ids)]
  found = []
  for start, after in itertools.pairwise(starts):
    if not is_text[start]:
      continue
    token = int(origin[start, Column.TOKEN])
    found.append(
      DocumentSpan(
        key=cast(Key, tuple(origin[start, : Column.TOKEN].tolist())),
        token=token if token >= 0 else None, start=start, end=after,
        segment=None if segments is None else int(segments[start]),
      )
    )  # fmt: skip
  return found
