"""Rows of tokens made of examples that come one after the other."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from paxlite.data.base import Batch


class Example(Protocol):
  """Token ids [n] and a mask of those that are targets [n]."""

  @property
  def ids(self) -> np.ndarray: ...

  @property
  def is_target(self) -> np.ndarray: ...


Row = tuple[Batch, tuple[int, int]]  # the row; then the next example and its next token


def stream_rows(
  examples: Iterator[tuple[int, Example]],
  seq_len: int,
  start_id: int,
  first: int = 0,
  offset: int = 0,
) -> Iterator[Row]:
  """Yields rows of concatenated examples, cut every `seq_len` tokens; the last row is padded.

  Args:
    examples: The numbers and examples.
    seq_len: Length of a row.
    start_id: The first input id of a row.
    first: An example whose first `offset` tokens are left out.
    offset: So many.
  """
  pending: list[np.ndarray] = []
  length = number = 0
  for number, example in examples:
    ids = example.ids[offset:] if number == first else example.ids
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


def packed_rows(
  examples: Iterator[tuple[int, Example]], seq_len: int, start_id: int
) -> Iterator[Row]:
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
