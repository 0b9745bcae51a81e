"""paxlite's side: DemoGPT with matrices of nanochat's sizes, on the same documents."""

import fiddle as fdl

from paxlite.config.templates import config
from paxlite.data.flat_tokens import FlatTokenRows
from paxlite.experiments.datasets import FlatTokens
from paxlite.experiments.demo import DemoGPT


class Beside(FlatTokens, DemoGPT):
  """DemoGPT, with held-out documents one in a row, so that none sees another."""

  HIDDEN_DIMS = 1024
  TRAIN_FILES: list[str] = []
  START_ID = 2  # EOS, which stands before a document in training
  SAMPLE_PROMPT = None
  EVAL_BATCH_SIZE = 16
  SUMMARY_INTERVAL_STEPS = 10

  def eval_inputs(self) -> dict[str, fdl.Config]:
    source = config(
      FlatTokenRows,
      path=self.DATASET_PATH,
      split='validation',
      seq_len=self.MAX_SEQ_LEN,
      rows='sequences',
      start_id=self.START_ID,
      vocab_path=self.VOCAB_PATH,
    )
    return {'held_out': self.eval_input(source)}
