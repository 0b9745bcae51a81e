"""The element order of peft's factors, which follows the rows of the weights.

A weight of theirs [out, in] has A [rank, in] and B [out, rank]. Inputs have the same order here and
there. The outputs have that of the tensor, of which a weight of ours may be some rows. Experts have
A [E·rank, in] and B [out, rank·E], in which the expert changes last in A and first in B.
"""

import numpy as np

from paxlite.weights.tensor_entries import Entry, whole


def rows_to_theirs(entry: Entry, b: np.ndarray) -> np.ndarray:
  """Maps B [out, rank] of a weight to [rows of the tensor, rank]; rows of others are 0."""
  if '/post/' in entry.ours:  # [D, …], of which D is the output
    return b
  rank = b.shape[1]
  value = entry.to_theirs(b.T.reshape(rank, *_made(entry)))
  rows = np.zeros((entry.shape[0], rank), b.dtype)
  part = entry.view(rows)
  part[...] = value.reshape(part.shape)
  return rows


def rows_to_ours(entry: Entry, rows: np.ndarray) -> np.ndarray:
  """Reverses rows_to_theirs."""
  if '/post/' in entry.ours:
    return rows
  return entry.to_ours(entry.view(rows)).reshape(rows.shape[1], -1).T


def _made(entry: Entry) -> tuple[int, ...]:
  """Returns the dimensions of the variable that are outputs, of one part of a combined one."""
  return entry.our_shape[1 if entry.part is None else 2 :]


def experts_to_theirs(entry: Entry, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Maps A [E, in, rank] and B [N, E, rank, out] to [in, E·rank] and [N·out, rank·E]."""
  N, E, rank, out = b.shape
  order = (3, 0, 2, 1) if _take_turns(entry) else (0, 3, 2, 1)
  return a.transpose(1, 0, 2).reshape(-1, E * rank), b.transpose(order).reshape(N * out, -1)


def experts_to_ours(
  entry: Entry, a: np.ndarray, b: np.ndarray, number: int
) -> tuple[np.ndarray, np.ndarray]:
  """Reverses experts_to_theirs, of N = `number` weights; `a` is [E·rank, in]."""
  E = entry.our_shape[0]
  ours_a = a.reshape(E, -1, a.shape[1]).transpose(0, 2, 1)
  rank = ours_a.shape[2]
  if _take_turns(entry):
    return ours_a, b.reshape(-1, number, rank, E).transpose(1, 3, 2, 0)
  return ours_a, b.reshape(number, -1, rank, E).transpose(0, 3, 2, 1)


def _take_turns(entry: Entry) -> bool:
  """Whether gates and the products beside them take turns, as in gpt-oss; others are halves."""
  return entry.to_ours is whole
