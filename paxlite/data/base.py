"""The protocol of inputs, and RowInput, which implements it for random-access sources.

Resuming a RowInput needs only the step: row r of the endless training order is row
permutation(seed, epoch)(r mod n) of the source, with epoch = r div n. This depends neither on the
number of processes nor on the batch size at which earlier rows were read.
"""

import dataclasses
import queue
import threading
from collections.abc import Generator, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np

from paxlite.core.errors import UserError
from paxlite.core.json_text import Json

Batch = dict[str, np.ndarray]
T = TypeVar('T')


class Input(Protocol):
  """The interface through which the trainer reads its data."""

  @property
  def batch_size(self) -> int:
    """Sequences in a global batch."""
    ...

  @property
  def max_token_id(self) -> int:
    """The largest possible token id, checked against the vocabulary before the first step."""
    ...

  @property
  def name(self) -> str:
    """Name of the dataset (its files or folder), for messages."""
    ...

  def train_batches(self, start: int, rows: slice) -> Iterator[Batch]:
    """Yields rows `rows` of the global batches of steps start, start + 1, … without end."""
    ...

  def eval_batches(self, rows: slice) -> Iterator[Batch]:
    """Yields rows `rows` of the batches of one pass; rows beyond the last one have weight 0."""
    ...


@runtime_checkable
class Seekable(Protocol):
  """An Input with a position that checkpoints must hold, because the step does not determine it."""

  def position(self, step: int) -> np.ndarray:
    """Returns the position before the batch of `step`, int64 [R, C].

    All processes return the same shape. Numbers that this process does not know, because it has
    not read those rows, are −1.
    """
    ...

  def seek(self, step: int, position: np.ndarray) -> None:
    """Makes train_batches(step, …) resume at a position in which all numbers are known."""
    ...


@runtime_checkable
class OnPolicyInput(Protocol):
  """An Input that makes batches with the newest parameters, so none is drawn ahead or twice."""

  def device_batches(self, sharding: Any, number: int, max_segments: int) -> Any:
    """Returns the batches on a mesh, of this number and later ones.

    They are `device_batches.StepBatches`, and have a method `state(number)`: the text that
    checkpoints hold.

    Args:
      sharding: The sharding of the batches' arrays [B, T].
      number: The number of the first batch.
      max_segments: The most segments of a packed row, padding included; 0: any number.
    """
    ...

  def drawn_shapes(self) -> Mapping[str, Any]:
    """Returns shapes and dtypes of the arrays of a global batch that is trained on."""
    ...

  def resume(self, step: int, state: Json) -> None:
    """Continues from the state in the checkpoint of `step`; None: it has none."""
    ...


def place(data: Input, step: int) -> str:
  """Names the rows in the batch of `step`, for messages."""
  return data.place(step) if hasattr(data, 'place') else f'batch {step} of {data.name}'


class RowArray(NamedTuple):
  """The dtype of an array of a row, and its dimensions after T."""

  dtype: str
  dims: tuple[int, ...] = ()


class RowSource(Protocol):
  """Rows of tokens with random access.

  If several consecutive rows form one example, such as a pair, the attribute `rows_per_example` is
  their number.
  """

  max_token_id: int
  name: str

  def __len__(self) -> int: ...

  def read(self, indices: np.ndarray) -> Batch:
    """Returns rows `indices` [b] as a batch of ids, labels and weights [b, T].

    A batch of packed rows also has segment_ids and segment_pos [b, T].
    """
    ...


@dataclasses.dataclass
class RowInput:
  """Endless shuffled batches of a RowSource, or one ordered pass over it."""

  source: RowSource  # the source of the rows
  batch_size: int  # rows in a global batch
  seed: int = 1234  # the shuffling seed
  shuffle: bool = True  # whether training shuffles, with a new order in each epoch
  max_eval_batches: int | None = None  # maximum batches of an evaluation; None reads all

  def __post_init__(self) -> None:
    if len(self.source) == 0:
      raise UserError(f'{self.source.name} holds no rows')
    if len(self.source) % self.rows_per_example:
      raise UserError(
        f'{self.source.name} holds {len(self.source)} sequences in examples of '
        f'{self.rows_per_example}: the last example is incomplete'
      )

  @property
  def rows_per_example(self) -> int:
    """Consecutive rows per example; they stay in one batch and in order."""
    return getattr(self.source, 'rows_per_example', 1)

  @property
  def max_token_id(self) -> int:
    return self.source.max_token_id

  @property
  def name(self) -> str:
    return self.source.name

  def train_batches(self, start: int, rows: slice) -> Iterator[Batch]:
    ahead = getattr(self.source, 'read_ahead', 0)
    for step in range(start, start + ahead):
      self._will_read(step, rows)
    step = start
    while True:
      if ahead:
        self._will_read(step + ahead, rows)
      yield self.read(numbers(step, self.batch_size)[rows])
      step += 1

  def _will_read(self, step: int, rows: slice) -> None:
    """Tells a remote source which rows will be read next."""
    indices = self.indices(numbers(step, self.batch_size)[rows])
    self.source.will_read(indices)  # type: ignore[attr-defined]

  def read(self, numbers: np.ndarray) -> Batch:
    """Returns the rows with these numbers [b] in the endless training order."""
    return self.source.read(self.indices(numbers))

  def indices(self, numbers: np.ndarray) -> np.ndarray:
    """Returns the source's indices of these rows [b] of the endless training order."""
    example, row = np.divmod(numbers, self.rows_per_example)
    n = len(self.source) // self.rows_per_example
    epoch, index = np.divmod(example, n)
    for e in np.unique(epoch) if self.shuffle else ():
      index[epoch == e] = permute(index[epoch == e], n, self.seed, int(e))
    return index * self.rows_per_example + row

  def place(self, step: int) -> str:
    """Names the rows in the batch of `step`, for messages."""
    drawn = numbers(step, self.batch_size)
    rows = self.indices(drawn).tolist()
    shown = ', '.join(map(str, rows[:8])) + (' …' if len(rows) > 8 else '')
    return f'rows {shown} of {len(self.source)}, epoch {drawn[0] // len(self.source)}, {self.name}'

  def eval_batches(self, rows: slice) -> Iterator[Batch]:
    n = len(self.source)
    count = -(-n // self.batch_size)
    if self.max_eval_batches is not None:
      count = min(count, self.max_eval_batches)
    for b in range(count):
      index = (b * self.batch_size + np.arange(self.batch_size, dtype=np.int64))[rows]
      last = n - self.rows_per_example + index % self.rows_per_example  # a whole example
      batch = self.source.read(np.where(index < n, index, last))
      if (index >= n).any():
        batch = batch | {'weights': batch['weights'] * (index < n)[:, None].astype(np.float32)}
      yield batch


def blanked(batch: Batch, where: np.ndarray) -> Batch:
  """Returns a batch of arrays [b, T] with padding in the place of its targets at `where` [b, T]."""
  return {name: np.where(where, np.zeros((), x.dtype), x) for name, x in batch.items()}


def one_segment(weights: np.ndarray) -> Batch:
  """Returns segment_ids and segment_pos [b, T] that make each row one segment.

  What follows the last target of a row is padding: no target depends on it.

  Args:
    weights: The weights of the targets [b, T].
  """
  is_text = np.logical_or.accumulate((weights != 0)[:, ::-1], axis=1)[:, ::-1]
  positions = np.broadcast_to(np.arange(weights.shape[1], dtype=np.int32), weights.shape)
  return {'segment_ids': is_text.astype(np.int32), 'segment_pos': positions}


def numbers(step: int, batch_size: int) -> np.ndarray:
  """Returns the numbers of the rows of a step's batch, counted from step 0, int64 [batch_size]."""
  return step * batch_size + np.arange(batch_size, dtype=np.int64)


def permute(indices: np.ndarray, n: int, seed: int, epoch: int) -> np.ndarray:
  """Evaluates a pseudorandom permutation of range(n), at `indices` only.

  It is a four-round Feistel network over a power of two with an even exponent that is at least n.
  A result outside range(n) is encrypted again until it falls inside
  (https://doi.org/10.1007/3-540-45760-7_9). This needs no table, and any index takes O(1).

  Args:
    indices: int64 [b], each in [0, n).
    n: Size of the range.
    seed: Seed that, together with `epoch`, chooses the permutation.
    epoch: Number of the pass.
  """
  half = np.uint64(max((int(n - 1).bit_length() + 1) // 2, 1))
  low = (np.uint64(1) << half) - np.uint64(1)
  keys = [mix(np.uint64((seed * 1_000_003 + epoch * 4 + r) % 2**64)) for r in range(4)]

  def encrypt(x: np.ndarray) -> np.ndarray:
    left, right = x >> half, x & low
    for key in keys:
      left, right = right, left ^ (mix(right ^ key) & low)
    return (left << half) | right

  out = encrypt(indices.astype(np.uint64))
  while (outside := out >= n).any():
    out[outside] = encrypt(out[outside])
  return out.astype(np.int64)


def mix(x: Any) -> Any:
  """The finalizer of splitmix64: maps uint64 to uint64; each bit depends on every input bit."""
  with np.errstate(over='ignore'):
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
  return x ^ (x >> np.uint64(31))


def prefetch(iterator: Iterator[T], size: int) -> Generator[T, None, None]:
  """Runs `iterator` in a thread, up to `size` items ahead, and raises its exceptions here.

  Closing the generator stops the thread.
  """
  items: queue.Queue = queue.Queue(maxsize=size)
  stop = threading.Event()

  def put(item: object) -> bool:
    while not stop.is_set():
      try:
        items.put(item, timeout=0.1)
        return True
      except queue.Full:
        continue
    return False

  def work() -> None:
    try:
      for item in iterator:
        if not put((item, None)):
          return
      put((None, StopIteration()))
    except BaseException as e:
      put((None, e))

  thread = threading.Thread(target=work, name='input', daemon=True)
  thread.start()
  try:
    while True:
      item, error = items.get()
      if isinstance(error, StopIteration):
        return
      if error is not None:
        raise error
      yield item
  finally:
    stop.set()
    thread.join()
