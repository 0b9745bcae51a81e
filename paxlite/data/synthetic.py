"""Random tokens, for speed measurements and smoke tests without files."""

import dataclasses
import zlib

import numpy as np

from paxlite.data.base import Batch


@dataclasses.dataclass
class SyntheticRows:
  """A RowSource of uniform random tokens; each row is a pure function of (seed, row)."""

  vocab_size: int  # the ids are in [0, vocab_size)
  seq_len: int  # length of a row
  num_rows: int = 1 << 20  # number of rows in an epoch
  packed: bool = False  # whether a row has two segments instead of one
  seed: int = 0  # seed of the tokens

  name = 'synthetic tokens'
  why_untraced = 'they are random numbers, not read from a file'

  @property
  def max_token_id(self) -> int:
    return self.vocab_size - 1

  @property
  def fingerprint(self) -> int:
    return zlib.crc32(f'{self.vocab_size} {self.num_rows} {self.seed}'.encode())

  def __len__(self) -> int:
    return self.num_rows

  def read(self, indices: np.ndarray) -> Batch:
    T = self.seq_len
    tokens = np.stack(
      [
        np.random.Generator(np.random.Philox(key=[self.seed, int(i)])).integers(
          self.vocab_size, size=T + 1, dtype=np.int32
        )
        for i in indices
      ]
    )
    weights = np.ones((len(indices), T), np.float32)
    batch = {'ids': tokens[:, :-1], 'labels': tokens[:, 1:], 'weights': weights}
    if self.packed:
      position = np.arange(T, dtype=np.int32)
      second = position >= T // 2
      broadcast = lambda row: np.broadcast_to(row.astype(np.int32), (len(indices), T))
      batch['segment_ids'] = broadcast(1 + second)
      batch['segment_pos'] = broadcast(position - second * (T // 2))
    return batch
