"""The positions of streams in their data, which checkpoints hold.

The terms are those of streams.py. A position is an array [R, 8], R = sub-batches × datasets, with
the fields of each dataset in the first sub-batch, then those in the second, and so on. A mixture of
streams has the positions of all of them, one below the other.
"""

import enum
from collections.abc import Sequence

import numpy as np

from paxlite.core.errors import UserError
from paxlite.data.contents import differ


class Field(enum.IntEnum):
  """The fields of a dataset in a sub-batch.

  EPOCH, SHARD, EXAMPLE and OFFSET (in tokens) are the cursor of the reader: what it reads next.
  They are −1 where another process has that reader. ROWS counts the rows of the sub-batch that were
  of the dataset. SUB_BATCHES is their number in a batch, READERS that of the dataset's readers, and
  FINGERPRINT identifies the dataset.
  """

  EPOCH = 0
  SHARD = 1
  EXAMPLE = 2
  OFFSET = 3
  ROWS = 4
  SUB_BATCHES = 5
  READERS = 6
  FINGERPRINT = 7


class StreamPositions:
  """The positions of one or several streams before each of the last steps.

  Args:
    name: Name of the input, for messages.
    first: The position of each stream before step 0 [sub-batches × datasets, 8].
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
    """Makes `begin` start at a position; raises UserError if the position belongs to other sources.

    Args:
      step: The step whose batch is read next.
      position: The position [R, 8].
    """
    datasets = [x[: len(x) // int(x[0, Field.SUB_BATCHES])] for x in self._first]
    found = self._split(position.copy(), [len(x) for x in datasets])
    expected = [x[:, Field.FINGERPRINT] for x in datasets]
    for table, fingerprints in zip(found, expected, strict=True):
      held = table[:, Field.FINGERPRINT].reshape(-1, len(fingerprints))
      if differ(held, fingerprints).any():
        raise UserError(
          f'{self._name} has changed since the checkpoint (files, their order or contents), so '
          'reading cannot continue from its position: put the data back, or choose another folder'
        )
      table[:, Field.FINGERPRINT] = np.tile(fingerprints, len(held))  # by the rule of today
    self._start = step, found

  def begin(self, start: int) -> list[np.ndarray]:
    """Returns the positions to read from; raises UserError if they are not known for that step."""
    at, positions = self._start
    if start != at:
      raise UserError(f'{self._name} is at step {at} and cannot go to {start} without a position')
    self._at = {start: positions}
    return positions

  def _split(self, position: np.ndarray, datasets: Sequence[int]) -> list[np.ndarray]:
    """Returns the position of each stream."""
    found, left = [], position
    for count in datasets:
      size = count * int(left[0, Field.SUB_BATCHES]) if len(left) else 0
      found.append(left[:size])
      left = left[size:]
    if len(left) or any(len(x) == 0 or len(x) % n for x, n in zip(found, datasets, strict=True)):
      raise UserError(
        f'{self._name}: the checkpoint has positions in other sources than these {sum(datasets)}'
      )
    return found


def merged(positions: np.ndarray) -> np.ndarray:
  """Returns the position [R, 8] of all processes from what each of them knows [P, R, 8]."""
  whole = positions.max(axis=0)
  assert (whole >= 0).all(), 'each reader is read by a process'
  return whole
