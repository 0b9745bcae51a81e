"""Rows from sources that can only be read in sequence: SeqIO tasks and datasets of documents.

A unit is one pass over a shard. Its examples come in an order that the seed, the epoch and the
shard determine, and rows are made of them. Several readers, each with its own shards, make the rows
of a batch, so that several processes share the work. The readers depend on the data and the batch
size alone, so the order of rows is the same on any number of processes: a process runs the readers
of its rows, and leaves out those rows of a reader that are another process's. Checkpoints hold the
positions of all readers (positions.py), so that a run resumes exactly where it was.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, Protocol

import numpy as np

from paxlite.core.errors import UserError
from paxlite.data.base import Batch, permute
from paxlite.data.positions import Column, StreamPositions
from paxlite.data.stream_rows import Example, Row, packed_rows, stream_rows

StreamRows = Literal['stream', 'packed']

# Each reader of a part holds a block of documents in memory, and reads it when it seeks.
_MOST_READERS = 8
_LEAST_BYTES = 1 << 20  # the least size of the shards of one reader
_BALANCE = 9 / 8  # the shards of one reader may be larger than those of another by this factor


class Examples(Protocol):
  """The side of a Part that rows are made of; about.py wraps it to measure examples."""

  def examples(
    self, shard: int, shuffle: bool, seed: int | None, start: int
  ) -> Iterator[tuple[int, Example]]:
    """Yields the numbers and Examples of a shard, from number `start` on."""
    ...


class Part(Examples, Protocol):
  """A dataset, alone or in a mixture.

  Attributes:
    name: Name of the dataset.
    rate: The dataset's share of the rows, not normalized.
    num_shards: Number of shards; each can be read alone.
    shard_bytes: About how large each shard is [num_shards].
    fingerprint: A number that identifies the contents of the dataset.
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
  """The data that a StreamInput reads.

  Attributes:
    name: Name of the source, for messages.
    max_token_id: The largest id that can occur.
    start_id: The first input id of a text.
    parts: The datasets.
  """

  name: str
  max_token_id: int
  start_id: int
  parts: Sequence[Part]


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
    self._seed = seed
    self._shuffle = shuffle
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
    """The share of the rows of each part [parts]."""
    rates = np.array([part.rate for part in self.source.parts], np.float64)
    return rates / rates.sum()

  def first_position(self, batch_size: int) -> np.ndarray:
    """Returns the position before the first row, [lanes × parts, 8]; see positions.py.

    Args:
      batch_size: Rows of a global batch; that of a mixture differs from the stream's.
    """
    parts = self.source.parts
    readers = [_num_readers(part.shard_bytes, batch_size) for part in parts]
    position = np.zeros((max(readers), len(parts), len(Column)), np.int64)
    position[:, :, Column.LANES] = max(readers)
    position[:, :, Column.READERS] = readers
    position[:, :, Column.FINGERPRINT] = [part.fingerprint for part in parts]
    if len(parts) > 1:
      # Each lane begins at another place of the same order of parts, so that every batch has all.
      counts = np.zeros(len(parts), np.int64)
      for lane in range(1, max(readers)):
        for _ in range(batch_size // max(readers)):
          counts[_behind(self.shares, counts)] += 1
        position[lane, :, Column.ROWS] = counts
    return position.reshape(-1, len(Column))

  def position(self, step: int) -> np.ndarray:
    """Returns the position before the batch of `step`, as far as this process knows it.

    The batch of the step before it must have been drawn.
    """
    return self._positions[step]

  def seek(self, step: int, position: np.ndarray) -> None:
    """Makes train_batches(step, …) resume at a position.

    Raises:
      UserError: The position belongs to other data, or to another number of parts.
    """
    self._positions.seek(step, position)

  def train_batches(self, start: int, rows: slice) -> Iterator[Batch]:
    """Yields rows `rows` of the global batches of steps start, start + 1, … without end.

    Raises:
      UserError: `start` is not the step that `seek` was given (0 without a seek).
    """
    (position,) = self._positions.begin(start)
    reader = Reader(self, rows, self.batch_size, position)
    every = np.arange(self.batch_size, dtype=np.int64)
    for step in itertools.count(start):
      batch = reader.read(every)
      self._positions[step + 1] = [reader.position]
      yield batch

  def eval_batches(self, rows: slice) -> Iterator[Batch]:
    """Yields rows `rows` of the batches of one pass, which every process reads in full.

    Rows beyond the last one have weight 0.
    """
    found = (
      row
      for part in self.source.parts
      for unit in range(part.num_shards)
      for row, _ in self.rows_of(part, unit, epoch=None)
    )
    for number in itertools.count():
      batch = list(itertools.islice(found, self.batch_size))
      if not batch and number == 0:
        raise UserError(
          f'{self.name}: there is nothing to evaluate on. If one of many documents is to be held '
          'out, lower --fdl.HELD_OUT_EVERY, or name others with --fdl.EVAL_SOURCES'
        )
      if not batch or number == self._max_eval_batches:
        return
      empty = {k: np.zeros_like(v) for k, v in batch[0].items()}
      batch += [empty] * (self.batch_size - len(batch))
      yield _stacked(batch[rows])

  def rows_of(
    self, part: Examples, unit: int, epoch: int | None, example: int = 0, offset: int = 0
  ) -> Iterator[Row]:
    """Returns the rows of one shard in the order of an epoch, from token `offset` of an example on.

    With epoch None, the rows are in the order in which they are stored.
    """
    shuffled = self._shuffle and epoch is not None
    seed = None if epoch is None else (self._seed + epoch * 7919) % 2**31
    examples = part.examples(unit, shuffled, seed, example)
    if self.rows == 'stream':
      return stream_rows(examples, self.seq_len, self.source.start_id, offset)
    return packed_rows(examples, self.seq_len, self.source.start_id)

  def unit_order(self, units: Sequence[int], epoch: int) -> list[int]:
    if not self._shuffle or len(units) == 1:
      return list(units)
    order = permute(np.arange(len(units), dtype=np.int64), len(units), self._seed, epoch)
    return [units[i] for i in order]


class Reader:
  """Reads the rows of one process from a StreamInput.

  Args:
    data: The input.
    rows: The rows of a batch that this process has.
    batch_size: Rows of a global batch.
    position: Where to begin.
  """

  def __init__(self, data: StreamInput, rows: slice, batch_size: int, position: np.ndarray):
    parts = data.source.parts
    self._rows = rows
    self._shares = data.shares
    self._position = position.reshape(-1, len(parts), len(Column)).copy()
    self._lane_rows = batch_size // len(self._position)
    self._reader_rows = batch_size // self._position[0, :, Column.READERS]
    self._streams = {
      (p, reader): self._opened(data, p, reader)
      for p in range(len(parts))
      for reader in range(
        rows.start // self._reader_rows[p], (rows.stop - 1) // self._reader_rows[p] + 1
      )
    }

  def _opened(self, data: StreamInput, part: int, reader: int) -> '_Stream':
    lane = reader * self._reader_rows[part] // self._lane_rows
    at = self._position[lane, part]
    place = tuple(map(int, at[: Column.ROWS]))
    assert min(place) >= 0, 'the position is known'
    return _Stream(data, data.source.parts[part], reader, int(at[Column.READERS]), place)

  @property
  def position(self) -> np.ndarray:
    """The position [lanes × parts, 8], without the places of readers of other processes."""
    found = self._position.copy()
    found[:, :, : Column.ROWS] = -1
    for (part, reader), stream in self._streams.items():
      lanes = self._reader_rows[part] // self._lane_rows
      found[reader * lanes : (reader + 1) * lanes, part, : Column.ROWS] = stream.place
    return found.reshape(-1, len(Column))

  def read(self, slots: np.ndarray) -> Batch:
    """Returns the next rows of the stream, as far as they are this process's.

    Args:
      slots: The ascending numbers of those rows of a batch that are of this stream [n].
    """
    drawn = []
    for slot, part in zip(slots.tolist(), self._parts(slots), strict=True):
      stream = self._streams.get((part, slot // int(self._reader_rows[part])))
      if stream is not None:
        row = next(stream)
        if self._rows.start <= slot < self._rows.stop:
          drawn.append(row)
    return _stacked(drawn)

  def _parts(self, slots: np.ndarray) -> list[int]:
    """Chooses the part of each row, and counts the rows: the part furthest behind its share."""
    lanes = slots // self._lane_rows
    counts = self._position[:, :, Column.ROWS]
    if len(self._shares) == 1:
      np.add.at(counts[:, 0], lanes, 1)
      return [0] * len(slots)
    chosen = []
    for lane in lanes.tolist():
      chosen.append(_behind(self._shares, counts[lane]))
      counts[lane, chosen[-1]] += 1
    return chosen


def _behind(shares: np.ndarray, counts: np.ndarray) -> int:
  """Returns the part that is furthest behind its share of the rows, after `counts` rows [parts]."""
  return int(np.argmax(shares * (counts.sum() + 1) - counts))


def _num_readers(shard_bytes: Sequence[float], batch_size: int) -> int:
  """Returns how many readers share the shards of a part: a power of two that divides a batch.

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


class _Stream:
  """The endless rows of one reader of a part.

  Args:
    data: The input.
    part: The part.
    reader: Number of the reader.
    readers: Number of readers of the part.
    place: Epoch, unit, example and token of that example to begin at.
  """

  def __init__(
    self, data: StreamInput, part: Part, reader: int, readers: int, place: tuple[int, ...]
  ):
    self._data, self._part = data, part
    self._units = list(range(reader, part.num_shards, readers))
    self.place = place
    self._rows = self._opened()

  def __next__(self) -> Batch:
    epoch, unit, _, _ = self.place
    started = epoch
    while (found := next(self._rows, None)) is None:
      unit += 1
      if unit == len(self._units):
        epoch, unit = epoch + 1, 0
      if epoch > started + 1:
        raise UserError(
          f'{self._part.name} has no row for one of its readers: it is empty or too small'
        )
      self.place = epoch, unit, 0, 0
      self._rows = self._opened()
    row, (example, offset) = found
    self.place = epoch, unit, example, offset
    return row

  def _opened(self) -> Iterator[Row]:
    epoch, unit, example, offset = self.place
    number = self._data.unit_order(self._units, epoch)[unit]
    return self._data.rows_of(self._part, number, epoch, example, offset)


def _stacked(rows: Sequence[Mapping[str, np.ndarray]]) -> Batch:
  return {k: np.stack([row[k] for row in rows]) for k in rows[0]} if rows else {}
