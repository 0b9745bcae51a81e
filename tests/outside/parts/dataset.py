"""A dataset: rows that are computed from their number."""

import dataclasses
import zlib

import numpy as np

from paxlite.config.templates import config
from paxlite.data.base import RowInput
from paxlite.experiments.demo import TinyGPT


@dataclasses.dataclass
class CountingRows:
  """Numbers that count upwards by a step of 1 to 4 from a random start."""

  vocab_size: int
  seq_len: int
  num_rows: int = 4096
  name = 'counting'

  @property
  def max_token_id(self):
    return self.vocab_size - 1

  @property
  def fingerprint(self):  # optional: a run does not continue on other data
    return zlib.crc32(repr(self).encode())

  def __len__(self):
    return self.num_rows

  def read(self, indices):
    number = np.asarray(indices)[:, None]
    counted = number * 7919 + np.arange(self.seq_len + 1) * (1 + number % 4)
    tokens = (counted % self.vocab_size).astype(np.int32)
    weights = np.ones((len(indices), self.seq_len), np.float32)
    return {'ids': tokens[:, :-1], 'labels': tokens[:, 1:], 'weights': weights}


class Counting(TinyGPT):
  NUM_LAYERS = 1
  MAX_STEPS = 30
  LEARNING_RATE = 0.01
  LR_SCHEDULE = 'constant'

  def train_input(self):
    rows = config(CountingRows, vocab_size=self.VOCAB_SIZE, seq_len=self.MAX_SEQ_LEN)
    return config(RowInput, source=rows, batch_size=self.batch_size)
