"""Episodes that share rows, so that short ones cost no padding."""

import dataclasses
from collections.abc import Collection, Sequence

import numpy as np

from paxlite.data.base import Batch
from paxlite.finetuning.chats.sft import pack


@dataclasses.dataclass(frozen=True)
class Packing:
  """Packs the episodes of a batch into the first microbatches; the others stay empty.

  The step skips these (Task.skips_empty), so that a batch holds the same episodes as without
  packing, in arrays of the same shape.

  Attributes:
    microbatches: The number of microbatches of a batch.
    most_segments: The most segments of a row, padding included; 0: any number.
  """

  microbatches: int
  most_segments: int = 0

  def batch(
    self, rows: Sequence[Batch], lengths: Sequence[int], places: Collection[str] = ()
  ) -> Batch:
    """Returns arrays [B, T], with segment_ids and segment_pos, of as many episodes.

    Args:
      rows: The arrays [T] of each episode.
      lengths: How many of their tokens count.
      places: Names of arrays of indices of tokens in the row.
    """
    count, T = len(rows), len(rows[0]['ids'])
    order = sorted(range(count), key=lambda i: -lengths[i])  # long ones first leave few gaps
    packed = pack([lengths[i] for i in order], T, self.most_segments - 1)
    found = {name: np.zeros((count, T), x.dtype) for name, x in rows[0].items()}
    found |= {name: np.zeros((count, T), np.int32) for name in ('segment_ids', 'segment_pos')}
    size = count // self.microbatches
    for number, members in enumerate(packed):
      # a microbatch has every n-th row of the batch
      row, start = number % size * self.microbatches + number // size, 0
      for segment, episode in enumerate((order[i] for i in members), 1):
        length = lengths[episode]
        here = row, slice(start, start + length)
        for name, x in rows[episode].items():
          found[name][here] = x[:length] + start if name in places else x[:length]
        found['segment_ids'][here], found['segment_pos'][here] = segment, np.arange(length)
        start += length
    return found
