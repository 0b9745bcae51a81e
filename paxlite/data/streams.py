"""Rows from sources that can only be read in sequence: SeqIO tasks and datasets of documents.

The terms, here and in positions.py:

  dataset    a sequence of examples, alone or in a mixture
  shard      a part of a dataset that can be read alone, as a file; an epoch reads each shard once
  reader     what reads some of the shards of a dataset, one after the other, and makes rows of them
  sub-batch  consecutive rows of a batch; there are as many as the most readers of any dataset
  cursor     where a reader is: the epoch, the shard among its own, the example and its token

A batch of 8 rows, of dataset A with 4 readers and dataset B with 2:

  rows        0   1 | 2   3 | 4   5 | 6   7
  sub-batch     0   |   1   |   2   |   3       each chooses a dataset for each row, by their shares
  of A        rdr 0 | rdr 1 | rdr 2 | rdr 3     reader r has shards r, r + 4, r + 8, …
  of B            reader 0  |   reader 1        reader r has shards r, r + 2, r + 4, …
  processes      process 0  |  process 1        each runs the readers of its rows

The numbers of readers depend on the data and the batch size alone, so the order of rows is the same
on any number of processes. A process runs the readers of its rows, and leaves out those rows of a
reader that are another process's. The seed, the epoch and the shard determine the order of its
examples. Checkpoints hold the cursors of all readers, so that a run resumes exactly where it was.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, Protocol

import numpy as np

from paxlite.core.errors import UserError
from paxlite.data.base import Batch, permute
from paxlite.data.positions import Field, StreamPositions
from paxlite.data.stream_rows import Example, Row, packed_rows, stream_rows

StreamRows = Literal['stream', 'packed']

# Each reader of a dataset holds a block of documents in memory, and reads it when it seeks.
_MOST_READERS = 8
_LEAST_BYTES = 1 << 20  # the least size of the shards of one reader
_BALANCE = 9 / 8  # the shards of one reader may be larger than those of another by this factor


class Examples(Protocol):
  """The side of a Dataset that rows are made of; data_summary.py wraps it to measure examples."""

  def examples(
    self, shard: int, shuffle: bool, seed: int | None, start: int
  ) -> Iterator[tuple[int, Example]]:
    """Yields the numbers and Examples of a shard, from number `start` on."""
    ...


class Dataset(Examples, Protocol):
  """A dataset, alone or in a mixture.

  Attributes:
    name: Name of the dataset.
    rate: The dataset's share of the rows, not normalized.
    num_shards: Number of shards; each can be read alone.
    shard_bytes: About how large each shard is [num_shards].
    fingerprint: A checksum of the contents of the dataset, as in contents.py.
  """

  @property
  def fingerprint(self) -> int: ...

  @property
  def name(self) -> str: ...

  @property
  def rate(self) -> float: ...

  @property
  def num_shards(self) -> int: ...

  @property
  def shard_bytes(self) -> Sequence[float]: ...


class StreamSource(Protocol):
  """The data that a StreamInput reads."""

  name: str  # name of the source, for messages
  max_token_id: int  # the largest id that can occur
  start_id: int  # the first input id of a document
  datasets: Sequence[Dataset]


class StreamInput:
  """An Input over a StreamSource.

  Args:
    source: The source that is read.
    seq_len: Length T of a row.
    batch_size: Rows of a global batch.
    rows: 'stream': examples are concatenated and cut every T tokens, as Pax trains on the Pile.
      'packed': a row holds several examples, each truncated to T tokens, and no token attends to
      another example.
    seed: Seed of the order of examples.
    shuffle: Whether training shuffles.
    max_eval_batches: An evaluation ends after this many batches; None reads all.
  """

  def __init__(
    self,
    source: StreamSource,
    seq_len: int,
    batch_size: int,
    rows: StreamRows = 'stream',
    seed: int = 1234,
    shuffle: bool = True,
    max_eval_batches: int | None = None,
  ):
    self.source = source
    self.batch_size = batch_size
    self.seq_len = seq_len
    self.rows = rows
    self.seed = seed
    self.shuffle = shuffle
    self._max_eval_batches = max_eval_batches
    self._positions = StreamPositions(self.name, [self.first_position(batch_size)])

  @property
  def name(self) -> str:
    return self.source.name

  @property
  def max_token_id(self) -> int:
    return self.source.max_token_id

  @property
  def shares(self) -> np.ndarray:
    """The share of the rows of each dataset [datasets]."""
    rates = np.array([dataset.rate for dataset in self.source.datasets], np.float64)
    return rates / rates.sum()

  def first_position(self, batch_size: int) -> np.ndarray:
    """Returns the position before the first row, [sub-batches × datasets, 8]; see positions.py.

    Args:
      batch_size: Rows of a global batch; that of a mixture differs from the stream's.
    """
    datasets = self.source.datasets
    readers = [_num_readers(dataset.shard_bytes, batch_size) for dataset in datasets]
    position = np.zeros((max(readers), len(datasets), len(Field)), np.int64)
    position[:, :, Field.SUB_BATCHES] = max(readers)
    position[:, :, Field.READERS] = readers
    position[:, :, Field.FINGERPRINT] = [dataset.fingerprint for dataset in datasets]
    if len(datasets) > 1:
      # Each sub-batch begins elsewhere in the same order of datasets, so that every batch has all.
      counts = np.zeros(len(datasets), np.int64)
      for sub_batch in range(1, max(readers)):
        for _ in range(batch_size // max(readers)):
          counts[_behind(self.shares, counts)] += 1
        position[sub_batch, :, Field.ROWS] = counts
    return position.reshape(-1, len(Field))

  def position(self, step: int) -> np.ndarray:
    """Returns the position before the batch of `step`, as far as this process knows it.

    The batch of the step before it must have been drawn.
    """
    return self._positions[step]

  def seek(self, step: int, position: np.ndarray) -> None:
    """Makes train_batches(step, …) resume at a position.

    Raises UserError if the position belongs to other data, or to another number of datasets.
    """
    self._positions.seek(step, position)

  def train_batches(self, start: int, rows: slice) -> Iterator[Batch]:
    """Yields rows `rows` of the global batches of steps start, start + 1, … without end.

    Raises UserError if `start` is not the step that `seek` was given (0 without a seek).
    """
    (position,) = self._positions.begin(start)
    stream = ProcessRows(self, rows, self.batch_size, position)
    every = np.arange(self.batch_size, dtype=np.int64)
    for step in itertools.count(start):
      batch = stream.read(every)
      self._positions[step + 1] = [stream.position]
      yield batch

  def eval_batches(self, rows: slice) -> Iterator[Batch]:
    """Yields rows `rows` of the batches of one pass, which every process reads in full.

    Rows beyond the last one have weight 0.
    """
    found = (
      row
      for dataset in self.source.datasets
      for shard in range(dataset.num_shards)
      for row, _ in self.rows_of(dataset, shard, epoch=None)
    )
    for number in itertools.count():
      batch = list(itertools.islice(found, self.batch_size))
      if not batch and number == 0:
        raise UserError(
          f'{self.name}: there is nothing to evaluate on. EVAL_SOURCES names other documents'
          + ''.join(getattr(x, 'way_out', '') for x in self.source.datasets)
        )
      if not batch or number == self._max_eval_batches:
        return
      empty = {k: np.zeros_like(v) for k, v in batch[0].items()}
      batch += [empty] * (self.batch_size - len(batch))
      yield _stacked(batch[rows])

  def rows_of(
    self, dataset: Examples, shard: int, epoch: int | None, example: int = 0, offset: int = 0
  ) -> Iterator[Row]:
    """Returns the rows of one shard in the order of an epoch, from token `offset` of an example on.

    With epoch None, the rows are in the order in which they are stored.
    """
    shuffled = self.shuffle and epoch is not None
    seed = None if epoch is None else (self.seed + epoch * 7919) % 2**31
    examples = dataset.examples(shard, shuffled, seed, example)
    if self.rows == 'stream':
      return stream_rows(examples, self.seq_len, self.source.start_id, example, offset)
    return packed_rows(examples, self.seq_len, self.source.start_id)

  def shard_order(self, shards: Sequence[int], epoch: int) -> list[int]:
    """Returns the shards of a reader in the order in which an epoch reads them."""
    if not self.shuffle or len(shards) == 1:
      return list(shards)
    order = permute(np.arange(len(shards), dtype=np.int64), len(shards), self.seed, epoch)
    return [shards[i] for i in order]


class ProcessRows:
  """The rows of one process from a StreamInput.

  Args:
    rows: The rows of a batch that this process has.
    batch_size: Rows of a global batch.
    position: Where to begin.
  """

  def __init__(self, data: StreamInput, rows: slice, batch_size: int, position: np.ndarray):
    datasets = data.source.datasets
    self._rows = rows
    self._shares = data.shares
    self._position = position.reshape(-1, len(datasets), len(Field)).copy()
    self._sub_batch_rows = batch_size // len(self._position)
    self._reader_rows = batch_size // self._position[0, :, Field.READERS]
    self._readers = {
      (p, reader): self._opened(data, p, reader)
      for p in range(len(datasets))
      for reader in range(
        rows.start // self._reader_rows[p], (rows.stop - 1) // self._reader_rows[p] + 1
      )
    }

  def _opened(self, data: StreamInput, dataset: int, reader: int) -> '_ShardReader':
    sub_batch = reader * self._reader_rows[dataset] // self._sub_batch_rows
    at = self._position[sub_batch, dataset]
    cursor = tuple(map(int, at[: Field.ROWS]))
    assert min(cursor) >= 0, 'the position is known'
    return _ShardReader(data, data.source.datasets[dataset], reader, int(at[Field.READERS]), cursor)

  @property
  def position(self) -> np.ndarray:
    """The position [sub-batches × datasets, 8]; cursors of other processes' readers are −1."""
    found = self._position.copy()
    found[:, :, : Field.ROWS] = -1
    for (dataset, number), reader in self._readers.items():
      sub_batches = self._reader_rows[dataset] // self._sub_batch_rows
      own = slice(number * sub_batches, (number + 1) * sub_batches)
      found[own, dataset, : Field.ROWS] = reader.cursor
    return found.reshape(-1, len(Field))

  def read(self, row_numbers: np.ndarray) -> Batch:
    """Returns the next rows of the stream, as far as they are this process's.

    Args:
      row_numbers: The ascending numbers of those rows of a batch that are of this stream [n].
    """
    drawn = []
    for number, dataset in zip(row_numbers.tolist(), self._datasets(row_numbers), strict=True):
      reader = self._readers.get((dataset, number // int(self._reader_rows[dataset])))
      if reader is not None:
        row = next(reader)
        if self._rows.start <= number < self._rows.stop:
          drawn.append(row)
    return _stacked(drawn)

  def _datasets(self, row_numbers: np.ndarray) -> list[int]:
    """Chooses for each row the dataset furthest behind its share, and counts the rows."""
    sub_batches = row_numbers // self._sub_batch_rows
    counts = self._position[:, :, Field.ROWS]
    if len(self._shares) == 1:
      np.add.at(counts[:, 0], sub_batches, 1)
      return [0] * len(row_numbers)
    chosen = []
    for sub_batch in sub_batches.tolist():
      chosen.append(_behind(self._shares, counts[sub_batch]))
      counts[sub_batch, chosen[-1]] += 1
    return chosen


def _behind(shares: np.ndarray, counts: np.ndarray) -> int:
  """Returns the dataset furthest behind its share of the rows, after `counts` rows [datasets]."""
  return int(np.argmax(shares * (counts.sum() + 1) - counts))


def _num_readers(shard_bytes: Sequence[float], batch_size: int) -> int:
  """Returns how many readers share the shards of a dataset: a power of two that divides a batch.

  All readers get about the same share of the data, so that no shard is read more often than others.
  """
  readers = 1
  while 2 * readers <= _MOST_READERS and batch_size % (2 * readers) == 0:
    readers *= 2
  while readers > 1:
    sizes = [sum(shard_bytes[reader::readers]) for reader in range(readers)]
    if min(sizes) >= _LEAST_BYTES and max(sizes) <= _BALANCE * min(sizes):
      break
    readers //= 2
  return readers


class _ShardReader:
  """One reader of a dataset, with endless sequences.

  Args:
    readers: Number of readers of the dataset.
    cursor: Epoch, shard, example and token of that example to begin at.
  """

  def __init__(
    self, data: StreamInput, dataset: Dataset, reader: int, readers: int, cursor: tuple[int, ...]
  ):
    self._data, self._dataset = data, dataset
    self._shards = list(range(reader, dataset.num_shards, readers))
    self.cursor = cursor
    self._rows = self._opened()

  def __next__(self) -> Batch:
    epoch, shard, _, _ = self.cursor
    started = epoch
    while (found := next(self._rows, None)) is None:
      shard += 1
      if shard == len(self._shards):
        epoch, shard = epoch + 1, 0
      if epoch > started + 1:
        left_out = getattr(self._dataset, 'left_out', None)
        raise UserError(
          f'{self._dataset.name} has no row for one of its readers: it is empty or too small'
          f'{", or LEAVE_OUT names too many of its records" if left_out else ""}'
        )
      self.cursor = epoch, shard, 0, 0
      self._rows = self._opened()
    row, (example, offset) = found
    self.cursor = epoch, shard, example, offset
    return row

  def _opened(self) -> Iterator[Row]:
    epoch, shard, example, offset = self.cursor
    number = self._data.shard_order(self._shards, epoch)[shard]
    return self._data.rows_of(self._dataset, number, epoch, example, offset)


def _stacked(rows: Sequence[Mapping[str, np.ndarray]]) -> Batch:
  return {k: np.stack([row[k] for row in rows]) for k in rows[0]} if rows else {}
