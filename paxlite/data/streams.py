"""Rows from sources that can only be read in sequence: SeqIO tasks and datasets of documents.

A unit is one pass over a shard. Its examples come in an order that the seed, the epoch and the
shard determine, and rows are made of them. The position of a process in a part is (epoch, unit,
example, tokens of the example that are used, rows in all, the part's fingerprint). Checkpoints hold
the positions, so that a run resumes exactly where it was.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np

from paxlite.core.errors import UserError
from paxlite.data.base import Batch, Positions, permute

StreamRows = Literal['stream', 'packed']


class Example(Protocol):
  """Token ids [n] and a mask of those that are targets [n]."""

  @property
  def ids(self) -> np.ndarray: ...

  @property
  def is_target(self) -> np.ndarray: ...


class Part(Protocol):
  """A dataset, alone or in a mixture.

  Attributes:
    name: Name of the dataset.
    rate: The dataset's share of the rows, not normalized.
    num_shards: Number of shards, each of which can be read alone.
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

  def examples(
    self, shard: int, shuffle: bool, seed: int | None, start: int
  ) -> Iterator[tuple[int, Any]]:
    """Yields the numbers and Examples of a shard, from number `start` on."""
    ...


class Source(Protocol):
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
  """An Input over a Source.

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
    source: Source,
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
    self._positions = Positions(self.name, self.first_position)

  @property
  def name(self) -> str:
    return self.source.name

  @property
  def max_token_id(self) -> int:
    return self.source.max_token_id

  @property
  def first_position(self) -> np.ndarray:
    """The position before the first row [parts, 6]; the module docstring lists the columns."""
    return np.array([[0, 0, 0, 0, 0, part.fingerprint] for part in self.source.parts], np.int64)

  def position(self, step: int) -> np.ndarray:
    """Returns this process's position before the batch of `step`.

    The batch of the step before it must have been drawn.
    """
    return self._positions[step]

  def seek(self, step: int, position: np.ndarray) -> None:
    """Makes train_batches(step, …) resume at a position that `position(step)` returned.

    Raises:
      UserError: The position belongs to other data, or to another number of parts.
    """
    self._positions.seek(step, position)

  def train_batches(self, start: int, rows: slice) -> Iterator[Batch]:
    """Yields rows `rows` of the global batches of steps start, start + 1, … without end.

    Raises:
      UserError: `start` is not the step that `seek` was given (0 without a seek), or the rows of
        two processes overlap in part.
    """
    count = rows.stop - rows.start
    if rows.start % count or self.batch_size % count:
      raise UserError(
        f'{self.name}: this process would read rows {rows.start} to {rows.stop} of batches of '
        f'{self.batch_size}, and another some of the same. Put the sizes of DCN_MESH_SHAPE on axes '
        'before those of ICI_MESH_SHAPE'
      )
    reader = self.open(rows.start // count, self.batch_size // count, self._positions.begin(start))
    for step in itertools.count(start):
      batch = reader.read(count)
      self._positions[step + 1] = reader.position
      yield batch

  def open(self, process: int, processes: int, position: np.ndarray) -> 'Reader':
    """Returns a reader of one process's rows, from a position on."""
    return Reader(self, process, processes, position)

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
        raise UserError(f'{self.name}: there is nothing to evaluate on; none of it is held out')
      if not batch or number == self._max_eval_batches:
        return
      empty = {k: np.zeros_like(v) for k, v in batch[0].items()}
      batch += [empty] * (self.batch_size - len(batch))
      yield _stacked(batch[rows])

  def rows_of(
    self, part: Part, unit: int, epoch: int | None, example: int = 0, offset: int = 0
  ) -> Iterator['_Row']:
    """Returns the rows of one shard in the order of an epoch, from token `offset` of an example on.

    With epoch None, the rows are in the order in which they are stored.
    """
    shuffled = self._shuffle and epoch is not None
    seed = None if epoch is None else (self._seed + epoch * 7919) % 2**31
    examples = part.examples(unit, shuffled, seed, example)
    if self.rows == 'stream':
      return _stream_rows(examples, self.seq_len, self.source.start_id, offset)
    return _packed_rows(examples, self.seq_len, self.source.start_id)

  def unit_order(self, units: Sequence[int], epoch: int) -> list[int]:
    if not self._shuffle or len(units) == 1:
      return list(units)
    order = permute(np.arange(len(units), dtype=np.int64), len(units), self._seed, epoch)
    return [units[i] for i in order]


class Reader:
  """The endless rows of a StreamInput on one process; each part gets its share of the rows."""

  def __init__(self, data: StreamInput, process: int, processes: int, position: np.ndarray):
    parts = data.source.parts
    self._streams = [
      _Stream(data, part, process, processes, *map(int, stands[:4]))
      for part, stands in zip(parts, position, strict=True)
    ]
    self._counts = position[:, 4].copy()
    self._fingerprints = position[:, 5:]
    rates = np.array([part.rate for part in parts], np.float64)
    self._shares = rates / rates.sum()

  @property
  def position(self) -> np.ndarray:
    stands = zip(self._streams, self._counts, strict=True)
    found = [[*stream.position, count] for stream, count in stands]
    return np.concatenate([np.array(found, np.int64), self._fingerprints], axis=1)

  def read(self, count: int) -> Batch:
    """Returns a batch of the next `count` rows."""
    drawn = []
    for _ in range(count):
      # Choose the part that is furthest behind its share.
      chosen = int(np.argmax(self._shares * (self._counts.sum() + 1) - self._counts))
      drawn.append(next(self._streams[chosen]))
      self._counts[chosen] += 1
    return _stacked(drawn)


class _Stream:
  """The endless rows of one part on one process."""

  def __init__(
    self,
    data: StreamInput,
    part: Part,
    process: int,
    processes: int,
    epoch: int,
    unit: int,
    example: int,
    offset: int,
  ):
    self._data, self._part = data, part
    # With fewer shards than processes, every process reads all and keeps its share of the rows.
    by_shard = part.num_shards >= processes
    shards = list(range(part.num_shards))
    self._units = shards[process::processes] if by_shard else shards
    self._step = 1 if by_shard else processes
    self._first = 0 if by_shard else process
    self.position = epoch, unit, example, offset
    self._rows = self._opened()

  def __next__(self) -> Batch:
    epoch, unit, _, _ = self.position
    started = epoch
    while (found := next(self._rows, None)) is None:
      unit += 1
      if unit == len(self._units):
        epoch, unit = epoch + 1, 0
      if epoch > started + 1:
        raise UserError(
          f'{self._part.name} has no row for one of the processes: it is empty or too small'
        )
      self.position = epoch, unit, 0, 0
      self._rows = self._opened()
    row, (example, offset) = found
    self.position = epoch, unit, example, offset
    return row

  def _opened(self) -> Iterator['_Row']:
    epoch, unit, example, offset = self.position
    number = self._data.unit_order(self._units, epoch)[unit]
    rows = self._data.rows_of(self._part, number, epoch, example, offset)
    # The rows after one of this process are those of the other processes.
    skipped = self._step - 1 if example or offset else self._first
    return itertools.islice(rows, skipped, None, self._step)


_Row = tuple[Batch, tuple[int, int]]  # the row; then the next example and its next token


def _stream_rows(
  examples: Iterator[tuple[int, Example]], seq_len: int, start_id: int, offset: int
) -> Iterator[_Row]:
  """Yields rows of concatenated examples, cut every `seq_len` tokens; the last row is padded."""
  pending: list[np.ndarray] = []
  length = number = 0
  for number, example in examples:
    ids = example.ids[offset:]
    offset = 0
    pending.append(ids)
    length += len(ids)
    if length >= seq_len:
      tokens = np.concatenate(pending)
      for end in range(seq_len, length + 1, seq_len):
        left = length - end  # these tokens all belong to this example
        after = (number, len(example.ids) - left) if left else (number + 1, 0)
        yield _row([tokens[end - seq_len : end]], seq_len, start_id), after
      pending = [tokens[length // seq_len * seq_len :]]
      length = len(pending[0])
  if length:
    yield _row([np.concatenate(pending)], seq_len, start_id), (number + 1, 0)


def _packed_rows(
  examples: Iterator[tuple[int, Example]], seq_len: int, start_id: int
) -> Iterator[_Row]:
  """Yields rows of as many examples as fit, in the order in which they come."""
  segments: list[tuple[np.ndarray, np.ndarray]] = []
  length = number = 0
  packed = lambda: _row([s[0] for s in segments], seq_len, start_id, [s[1] for s in segments])
  for number, example in examples:
    ids = example.ids[:seq_len]
    if length + len(ids) > seq_len:
      yield packed(), (number, 0)
      segments, length = [], 0
    segments.append((ids, example.is_target[:seq_len]))
    length += len(ids)
  if segments:
    yield packed(), (number + 1, 0)


def _row(
  segments: Sequence[np.ndarray],
  seq_len: int,
  start_id: int,
  is_target: Sequence[np.ndarray] | None = None,
) -> Batch:
  """Returns a row [T] of segments; the first input of each segment is `start_id`."""
  row = {k: np.zeros(seq_len, np.int32) for k in ('ids', 'labels', 'segment_ids', 'segment_pos')}
  weights = np.zeros(seq_len, np.float32)
  start = 0
  for number, ids in enumerate(segments, 1):
    end = start + len(ids)
    row['labels'][start:end] = ids
    row['ids'][start] = start_id
    row['ids'][start + 1 : end] = ids[:-1]
    row['segment_ids'][start:end] = number
    row['segment_pos'][start:end] = np.arange(len(ids))
    weights[start:end] = 1 if is_target is None else is_target[number - 1]
    start = end
  return row | {'weights': weights}


def _stacked(rows: Sequence[Mapping[str, np.ndarray]]) -> Batch:
  return {k: np.stack([row[k] for row in rows]) for k in rows[0]}
