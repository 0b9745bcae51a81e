"""Direct preference optimization (https://arxiv.org/abs/2305.18290, equation 7) on pairs."""

import dataclasses

import jax
import numpy as np

from paxlite.config.templates import config
from paxlite.data.base import RowInput
from paxlite.experiments.demo import TinyGPT
from paxlite.losses.loss import Loss


@dataclasses.dataclass(frozen=True)
class Dpo(Loss):
  """−log σ(β · (how much more the chosen row has gained than the rejected one)), over pairs."""

  beta: float = 0.5

  def weight(self, batch):
    return (batch['weights'].max(1)[::2] > 0).sum()  # the last batch may have rows without targets

  def __call__(self, outputs, batch):
    gains_BT = (outputs.log_probs - outputs.reference.log_probs) * batch['weights']
    chosen, rejected = gains_BT[::2].sum(1), gains_BT[1::2].sum(1)
    each = -jax.nn.log_sigmoid(self.beta * (chosen - rejected))
    return (each * (batch['weights'].max(1)[::2] > 0)).sum()


@dataclasses.dataclass
class Pairs:
  """Row 2i counts upwards and is chosen, row 2i + 1 counts downwards and is rejected."""

  seq_len: int
  max_token_id: int
  name, rows_per_example = 'pairs', 2

  def __len__(self):
    return 1000

  def read(self, indices):
    indices = np.asarray(indices)[:, None]
    steps = np.where(indices % 2, -1, 1) * np.arange(self.seq_len + 1)
    tokens = ((indices // 2 * 7 + steps) % (self.max_token_id + 1)).astype(np.int32)
    weights = np.ones((len(indices), self.seq_len), np.float32)
    return {'ids': tokens[:, :-1], 'labels': tokens[:, 1:], 'weights': weights}


class Preferences(TinyGPT):
  MAX_STEPS, LR_COS_WARMUP, LEARNING_RATE, ROWS_PER_EXAMPLE = 4, 1, 1e-2, 2

  def losses(self):
    return {'dpo': config(Dpo)}

  def reference(self):
    return self.initial_reference()

  def train_input(self):
    rows = config(Pairs, seq_len=self.MAX_SEQ_LEN, max_token_id=self.VOCAB_SIZE - 1)
    return config(RowInput, source=rows, batch_size=self.batch_size)
