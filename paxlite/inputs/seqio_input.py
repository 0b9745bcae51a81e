"""SeqIO tasks and mixtures as an input: rows of tokens, each process from shards of its own.

A pass over a shard is a unit: its examples come in an order that the seed, the epoch and the shard
fix, and are made into rows. Where a process stands is (epoch, unit, rows of the unit) for each
task; checkpoints keep that, so that a run goes on after reading one unit again at most.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import numpy as np

from paxlite.errors import UserError
from paxlite.inputs.base import Batch, permute
from paxlite.inputs.seqio_tasks import Example, Part, find_parts

SeqioRows = Literal['stream', 'packed']

_POSITIONS = 64  # of how many steps positions are remembered: more than are read ahead


class SeqioInput:
  """An Input over a SeqIO task or mixture.

  Args:
    task: Of paxlite ('the_pile_lm', 'c4', 'lambada_eval', 'boolq'), or registered by the user.
    split: 'train', 'validation', …
    seq_len: Length T of a row.
    batch_size: Rows of a global batch.
    vocab_path: A SentencePiece model, for paxlite's tasks.
    tfds_data_dir: Where TFDS datasets are; '': TFDS_DATA_DIR, or TFDS' own default.
    rows: 'stream': examples one after the other, cut at T; a row's first input is 0, as Pax trains
      on the Pile. 'packed': whole examples, cut at T, several a row, none sees another.
    seed: Of the order.
    shuffle: Whether training shuffles.
    max_eval_batches: The pass of an evaluation ends after this many; None reads all.

  Raises:
    UserError: seqio is missing, or there is no such task, split or dataset.
  """

  def __init__(
    self,
    task: str,
    split: str,
    seq_len: int,
    batch_size: int,
    vocab_path: str = '',
    tfds_data_dir: str = '',
    rows: SeqioRows = 'stream',
    seed: int = 1234,
    shuffle: bool = True,
    max_eval_batches: int | None = None,
  ):
    self.batch_size = batch_size
    self.name = f'{task}/{split}'
    self._split = split
    self._seq_len = seq_len
    self._rows = rows
    self._seed = seed
    self._shuffle = shuffle
    self._max_eval_batches = max_eval_batches
    self._parts = find_parts(task, split, vocab_path, tfds_data_dir)
    self.max_token_id = max(part.vocab_size for part in self._parts) - 1
    self._positions: dict[int, np.ndarray] = {}
    self._start = 0, np.zeros((len(self._parts), 4), np.int64)

  def position(self, step: int) -> np.ndarray:
    """Where this process stands before the batch of `step`, if the one before it was drawn.

    Of each task the epoch, the unit, and the rows of the unit and of all [tasks, 4].
    """
    return self._positions[step]

  def seek(self, step: int, position: np.ndarray) -> None:
    """Makes train_batches(step, …) go on from what `position(step)` gave.

    Raises:
      UserError: it is of another number of tasks.
    """
    if position.shape != self._start[1].shape:
      raise UserError(
        f'{self.name}: the checkpoint stands in {len(position)} tasks and there are '
        f'{len(self._parts)}'
      )
    self._start = step, position

  def train_batches(self, start: int, rows: slice) -> Iterator[Batch]:
    """Rows `rows` of the global batches of steps start, start + 1, … without end.

    Raises:
      UserError: `start` is neither 0 nor a step that was sought.
    """
    at, position = self._start
    if start != at:
      raise UserError(
        f'{self.name} stands at step {at} and cannot go to {start} without a position'
      )
    count = rows.stop - rows.start
    process, processes = rows.start // count, self.batch_size // count
    streams = [
      _Stream(self, part, process, processes, *map(int, stands[:3]))
      for part, stands in zip(self._parts, position, strict=True)
    ]
    counts = position[:, 3].copy()
    rates = np.array([part.rate for part in self._parts])
    shares = rates / rates.sum()
    self._positions = {start: position}
    for step in itertools.count(start):
      drawn = []
      for _ in range(count):
        # the task that is furthest behind its share
        chosen = int(np.argmax(shares * (counts.sum() + 1) - counts))
        drawn.append(next(streams[chosen]))
        counts[chosen] += 1
      stands = [[*s.position, c] for s, c in zip(streams, counts, strict=True)]
      self._positions[step + 1] = np.array(stands, np.int64)
      self._positions.pop(step - _POSITIONS, None)
      yield _stacked(drawn)

  def eval_batches(self, rows: slice) -> Iterator[Batch]:
    """Rows `rows` of the batches of one pass, read by every process; beyond the last weigh 0."""
    found = (
      row
      for part in self._parts
      for unit in range(part.num_shards)
      for row in self.rows_of(part, unit, epoch=None)
    )
    for number in itertools.count():
      batch = list(itertools.islice(found, self.batch_size))
      if not batch or number == self._max_eval_batches:
        return
      empty = {k: np.zeros_like(v) for k, v in batch[0].items()}
      batch += [empty] * (self.batch_size - len(batch))
      yield _stacked(batch[rows])

  def rows_of(self, part: Part, unit: int, epoch: int | None) -> Iterator[Batch]:
    """The rows of one shard, in the order of an epoch; None: in the order of the file."""
    shuffled = self._shuffle and epoch is not None
    seed = None if epoch is None else (self._seed + epoch * 7919) % 2**31
    examples = part.examples(self._split, unit, shuffled, seed)
    make = _stream_rows if self._rows == 'stream' else _packed_rows
    return make(examples, self._seq_len)

  def unit_order(self, units: Sequence[int], epoch: int) -> list[int]:
    if not self._shuffle or len(units) == 1:
      return list(units)
    order = permute(np.arange(len(units), dtype=np.int64), len(units), self._seed, epoch)
    return [units[i] for i in order]


class _Stream:
  """The endless rows of one task on one process."""

  def __init__(
    self,
    data: SeqioInput,
    part: Part,
    process: int,
    processes: int,
    epoch: int,
    unit: int,
    done: int,
  ):
    self.part = part
    self._data = data
    # with fewer shards than processes all read all, and each keeps its share of the rows
    by_shard = part.num_shards >= processes
    shards = list(range(part.num_shards))
    self._units = shards[process::processes] if by_shard else shards
    self._keeps = slice(None) if by_shard else slice(process, None, processes)
    self._epoch, self._unit, self._done = epoch, unit, done
    self._iterator = self._opened()
    for _ in range(self._done):
      next(self._iterator)

  @property
  def position(self) -> list[int]:
    return [self._epoch, self._unit, self._done]

  def __next__(self) -> Batch:
    started = self._epoch
    while (row := next(self._iterator, None)) is None:
      self._unit, self._done = self._unit + 1, 0
      if self._unit == len(self._units):
        self._epoch, self._unit = self._epoch + 1, 0
      if self._epoch > started + 1:
        raise UserError(f'{self.part.name}: a whole pass over {self._data.name} gave no row')
      self._iterator = self._opened()
    self._done += 1
    return row

  def _opened(self) -> Iterator[Batch]:
    unit = self._data.unit_order(self._units, self._epoch)[self._unit]
    rows = self._data.rows_of(self.part, unit, self._epoch)
    return itertools.islice(rows, self._keeps.start, None, self._keeps.step)


def _stream_rows(examples: Iterator[Example], seq_len: int) -> Iterator[Batch]:
  """Targets one after the other, cut every `seq_len`; the last row is padded."""
  pending: list[np.ndarray] = []
  length = 0
  for example in examples:
    pending.append(example.ids)
    length += len(example.ids)
    if length >= seq_len:
      tokens = np.concatenate(pending)
      for start in range(0, length - seq_len + 1, seq_len):
        yield _row([tokens[start : start + seq_len]], seq_len)
      pending = [tokens[length // seq_len * seq_len :]]
      length = len(pending[0])
  if length:
    yield _row([np.concatenate(pending)], seq_len)


def _packed_rows(examples: Iterator[Example], seq_len: int) -> Iterator[Batch]:
  """Whole examples, as many as fit in the order in which they come."""
  segments: list[Example] = []
  length = 0
  for example in examples:
    cut = Example(example.ids[:seq_len], example.is_target[:seq_len])
    if length + len(cut.ids) > seq_len:
      yield _row([s.ids for s in segments], seq_len, [s.is_target for s in segments])
      segments, length = [], 0
    segments.append(cut)
    length += len(cut.ids)
  if segments:
    yield _row([s.ids for s in segments], seq_len, [s.is_target for s in segments])


def _row(
  segments: Sequence[np.ndarray], seq_len: int, is_target: Sequence[np.ndarray] | None = None
) -> Batch:
  """A row [T] of segments; the first input of each is 0."""
  row = {k: np.zeros(seq_len, np.int32) for k in ('ids', 'labels', 'segment_ids', 'segment_pos')}
  weights = np.zeros(seq_len, np.float32)
  start = 0
  for number, ids in enumerate(segments, 1):
    end = start + len(ids)
    row['labels'][start:end] = ids
    row['ids'][start + 1 : end] = ids[:-1]
    row['segment_ids'][start:end] = number
    row['segment_pos'][start:end] = np.arange(len(ids))
    weights[start:end] = 1 if is_target is None else is_target[number - 1]
    start = end
  return row | {'weights': weights}


def _stacked(rows: Sequence[Mapping[str, np.ndarray]]) -> Batch:
  return {k: np.stack([row[k] for row in rows]) for k in rows[0]}
