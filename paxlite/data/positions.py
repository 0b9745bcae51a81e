"""The position of streams in their data: one row of numbers for each part of each lane.

A batch is divided into lanes of equal numbers of consecutive rows. How many there are depends on
the data and the batch size, and not on the processes, so that the order of the rows does not
depend on them either. Readers of a part are shared by neighboring lanes. A position is an array
[R, 8], R = lanes × parts, lane by lane; a mixture of streams has the positions of all, one below
the other. Column names the columns.
"""

import enum
from collections.abc import Sequence

import numpy as np

from paxlite.core.errors import UserError


class Column(enum.IntEnum):
  """The columns of a position.

  EPOCH, UNIT, EXAMPLE and OFFSET (in tokens) say what the reader of the lane reads next. They are
  −1 where another process has that reader. ROWS counts the rows that the lane has had of the part,
  LANES are those of the stream, READERS those of the part, and FINGERPRINT is the part's.
  """

  EPOCH = 0
  UNIT = 1
  EXAMPLE = 2
  OFFSET = 3
  ROWS = 4
  LANES = 5
  READERS = 6
  FINGERPRINT = 7


class StreamPositions:
  """The positions of one or several streams before each of the last steps.

  Args:
    name: Name of the input, for messages.
    first: The position of each stream before step 0 [lanes × parts, 8].
  """

  _KEPT = 1024  # steps kept: more than are read ahead, or skipped before it is noticed

  def __init__(self, name: str, first: Sequence[np.ndarray]):
    self._name = name
    self._first = first
    self._start = 0, list(first)
    self._at: dict[int, list[np.ndarray]] = {}

  def __getitem__(self, step: int) -> np.ndarray:
    return np.concatenate(self._at[step])

  def __setitem__(self, step: int, positions: Sequence[np.ndarray]) -> None:
    self._at[step] = list(positions)
    self._at.pop(step - self._KEPT, None)

  def seek(self, step: int, position: np.ndarray) -> None:
    """Makes `begin` start at a position.

    Args:
      step: The step whose batch is read next.
      position: The position [R, 8].

    Raises:
      UserError: The position belongs to other sources.
    """
    parts = [x[: len(x) // int(x[0, Column.LANES])] for x in self._first]
    found = self._split(position, [len(x) for x in parts])
    expected = [x[:, Column.FINGERPRINT] for x in parts]
    for table, fingerprints in zip(found, expected, strict=True):
      held = table[:, Column.FINGERPRINT].reshape(-1, len(fingerprints))
      if (held != fingerprints).any():
        raise UserError(
          f'{self._name} is not what the checkpoint has read: files, their order or their contents '
          'have changed, so that reading cannot continue from its position'
        )
    self._start = step, found

  def begin(self, start: int) -> list[np.ndarray]:
    """Returns the positions to read from; raises UserError if they are not known for that step."""
    at, positions = self._start
    if start != at:
      raise UserError(f'{self._name} is at step {at} and cannot go to {start} without a position')
    self._at = {start: positions}
    return positions

  def _split(self, position: np.ndarray, parts: Sequence[int]) -> list[np.ndarray]:
    """Returns the position of each stream."""
    found, left = [], position
    for count in parts:
      size = count * int(left[0, Column.LANES]) if len(left) else 0
      found.append(left[:size])
      left = left[size:]
    if len(left) or any(len(x) == 0 or len(x) % n for x, n in zip(found, parts, strict=True)):
      raise UserError(
        f'{self._name}: the checkpoint has positions in other sources than these {sum(parts)}'
      )
    return found


def merged(positions: np.ndarray) -> np.ndarray:
  """Returns the position [R, 8] of all processes from what each of them knows [P, R, 8]."""
  whole = positions.max(axis=0)
  assert (whole >= 0).all(), 'each reader is read by a process'
  return whole
