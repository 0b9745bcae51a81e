"""Rows of several inputs by weights; the input of each row is computed from the row's number.

In every block of 1024 rows each input has exactly its share, and each block has its own order of
inputs. Each input goes through its epochs at its own pace, and each epoch has its own order.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from paxlite.core.errors import UserError
from paxlite.data.base import Batch, RowInput, numbers, one_segment, permute
from paxlite.data.positions import StreamPositions
from paxlite.data.streams import ProcessRows, StreamInput

_BLOCK = 1024


def mixture_of(
  inputs: Sequence[RowInput | StreamInput],
  weights: Sequence[float],
  batch_size: int,
  seed: int = 1234,
) -> 'MixtureInput':
  """Returns the mixture of these inputs, which is Seekable if any of them is a stream."""
  streams = any(isinstance(data, StreamInput) for data in inputs)
  return (StreamMixtureInput if streams else MixtureInput)(inputs, weights, batch_size, seed)


class MixtureInput:
  """An Input over other inputs with random access; its position follows from the step.

  Raises UserError if a weight is missing, not positive, or too small for one row in a block; or the
  inputs have different tokenizers.

  Args:
    inputs: The inputs; their batch sizes do not matter.
    weights: Weight of each input's rows; their sum does not matter.
    batch_size: Rows of a global batch.
    seed: Seed of the order of inputs.
  """

  def __init__(
    self,
    inputs: Sequence[RowInput | StreamInput],
    weights: Sequence[float],
    batch_size: int,
    seed: int = 1234,
  ):
    if not inputs or len(inputs) != len(weights):
      raise UserError(
        f'a mixture of {len(inputs)} sources has {len(weights)} weights: set one per source'
      )
    self.inputs, self.weights, self.batch_size, self._seed = inputs, weights, batch_size, seed
    for data, weight, quota in zip(inputs, weights, self.quotas, strict=True):
      if weight <= 0 or not quota:
        raise UserError(
          f'{data.name} has the weight {weight:g}, less than a row of {_BLOCK}: leave it out'
        )
    _check_tokenizers(inputs)
    self._has_segments = any(_has_segments(data) for data in inputs)

  @property
  def max_token_id(self) -> int:
    return max(data.max_token_id for data in self.inputs)

  @property
  def name(self) -> str:
    return ' + '.join(data.name for data in self.inputs)

  @functools.cached_property
  def quotas(self) -> list[int]:
    """The number of rows of each input in a block, rounded so that the sum is a block."""
    shares = np.maximum(self.weights, 0.0) / max(sum(self.weights), 1e-9) * _BLOCK
    quotas = np.floor(shares).astype(int)
    largest_rests = np.argsort(quotas - shares, kind='stable')
    quotas[largest_rests[: _BLOCK - quotas.sum()]] += 1
    return quotas.tolist()

  def train_batches(self, start: int, rows: slice) -> Iterator[Batch]:
    for step in itertools.count(start):
      yield self._read(self.order(step)[rows], self.inputs)

  def eval_batches(self, rows: slice) -> Iterator[Batch]:
    raise UserError(f'{self.name}: a mixture is for training; evaluate its sources one by one')

  def order(self, step: int) -> np.ndarray:
    """Returns (input, number in its order) of each row of a step, int64 [batch_size, 2]."""
    block, inside = np.divmod(numbers(step, self.batch_size), _BLOCK)
    found = np.empty((self.batch_size, 2), np.int64)
    for b in np.unique(block):
      here = block == b
      found[here] = self._block(int(b))[inside[here]]
    return found

  def _block(self, number: int) -> np.ndarray:
    chosen = np.repeat(np.arange(len(self.inputs)), self.quotas)
    chosen = chosen[permute(np.arange(_BLOCK, dtype=np.int64), _BLOCK, self._seed, number)]
    own = np.empty(_BLOCK, np.int64)
    for p, quota in enumerate(self.quotas):
      own[chosen == p] = number * quota + np.arange(quota)
    return np.stack([chosen, own], axis=1)

  def _read(self, order: np.ndarray, sources: Sequence[Any]) -> Batch:
    """Returns the rows at (input, number) [b, 2], each read from the source of its input."""
    batch: Batch = {}
    for p in np.unique(order[:, 0]):
      here = order[:, 0] == p
      found = sources[p].read(order[here, 1])
      if self._has_segments and 'segment_ids' not in found:
        found = found | one_segment(found['weights'])
      for name, value in found.items():
        whole = batch.setdefault(name, np.zeros((len(order), *value.shape[1:]), value.dtype))
        whole[here] = value
    return batch


class StreamMixtureInput(MixtureInput):
  """A mixture in which some inputs are streams, so that it is Seekable."""

  @functools.cached_property
  def _streams(self) -> dict[int, StreamInput]:
    return {p: x for p, x in enumerate(self.inputs) if isinstance(x, StreamInput)}

  @functools.cached_property
  def _positions(self) -> StreamPositions:
    first = [x.first_position(self.batch_size) for x in self._streams.values()]
    return StreamPositions(self.name, first)

  def position(self, step: int) -> np.ndarray:
    """Returns the positions of all streams, one below the other."""
    return self._positions[step]

  def seek(self, step: int, position: np.ndarray) -> None:
    self._positions.seek(step, position)

  def train_batches(self, start: int, rows: slice) -> Iterator[Batch]:
    found = zip(self._streams.items(), self._positions.begin(start), strict=True)
    opened = {
      p: ProcessRows(stream, rows, self.batch_size, position) for (p, stream), position in found
    }
    for step in itertools.count(start):
      order = self.order(step)
      # A stream must know all its rows of the batch, also those of other processes.
      of_streams = {p: _Drawn(x.read(np.flatnonzero(order[:, 0] == p))) for p, x in opened.items()}
      sources = [of_streams.get(p, data) for p, data in enumerate(self.inputs)]
      batch = self._read(order[rows], sources)
      self._positions[step + 1] = [x.position for x in opened.values()]
      yield batch


class _Drawn:
  """Rows of a stream that have been read, whatever their numbers in the stream's order are."""

  def __init__(self, batch: Batch):
    self._batch = batch

  def read(self, numbers: np.ndarray) -> Batch:
    return self._batch


def _check_tokenizers(inputs: Sequence[RowInput | StreamInput]) -> None:
  """Raises UserError if stored tokens are of several tokenizers.

  Those that are made now are of one tokenizer, which stored ones are compared with.
  """
  sources = [(getattr(data, 'source', None), data.name) for data in inputs]
  found = {getattr(source, 'tokenizer_fingerprint', None): name for source, name in sources}
  found.pop(None, None)
  if len(found) > 1:
    one, other, *_ = found.values()
    raise UserError(
      f'{one} and {other} use different tokenizers: tokenize all texts with one of them'
    )


def _has_segments(data: RowInput | StreamInput) -> bool:
  if isinstance(data, StreamInput):
    return True
  return 'segment_ids' in data.source.read(np.zeros(1, np.int64))
