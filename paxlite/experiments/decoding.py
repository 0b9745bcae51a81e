"""How an experiment's model continues text."""

from typing import Literal

from paxlite.core.errors import UserError
from paxlite.core.params import LocalPath
from paxlite.experiments.base import Experiment
from paxlite.generation.decoding import Sampling

# what a decoding depends on, besides weights and prompts
DECODING = (
  'DECODE_BATCH_SIZE',
  'MAX_DECODE_STEPS',
  'TEMPERATURE',
  'TOP_K',
  'TOP_P',
  'REPETITION_PENALTY',
  'EOS_IDS',
  'CHAT_TEMPLATE',
  'INT8_WEIGHTS',
)


class Decoding(Experiment):
  """Attributes of `--mode=decode` and of zero-shot evaluation, of every language model."""

  # The id that text begins with for the model; None: what its tokenizer begins with
  START_ID: int | None = 0
  EOS_IDS: list[int] = []  # ids that end a text; none: the tokenizer's

  DECODE_FILES: list[LocalPath] = []  # JSON lines with inputs, or with chat messages
  DECODE_BATCH_SIZE: int = 8
  MAX_DECODE_STEPS: int = 128
  TEMPERATURE: float = 0.0  # 0: the likeliest token
  TOP_K: int = 0  # 0: off
  TOP_P: float = 1.0  # 1: off
  REPETITION_PENALTY: float = 1.0  # 1: off
  CHAT_TEMPLATE: str = ''  # of Jinja; '': the one that comes with the tokenizer
  INT8_WEIGHTS: bool = False  # of the projections, a scale for each output channel

  # For --mode=eval: lambada:FILE.jsonl, boolq:FILE.jsonl, or the .json file of a task
  EVAL_TASKS: list[LocalPath] = []
  EVAL_BATCH_TOKENS: int = 4096  # of a batch of such a task, about
  EVAL_TOO_LONG: Literal['truncate', 'error'] = 'truncate'  # a text that the model cannot take
  EVAL_SKIP_UNREADABLE: bool = False  # records that are none are left out, and counted

  RESUMABLE_CHANGES = [
    *Experiment.RESUMABLE_CHANGES,
    'DECODE_FILES',
    *DECODING,
    'EVAL_TASKS',
    'EVAL_BATCH_TOKENS',
    'EVAL_TOO_LONG',
    'EVAL_SKIP_UNREADABLE',
  ]

  def validate(self) -> None:
    super().validate()
    for name in ('DECODE_BATCH_SIZE', 'MAX_DECODE_STEPS', 'EVAL_BATCH_TOKENS'):
      if getattr(self, name) < 1:
        raise UserError(f'{name}={getattr(self, name)} must be at least 1')
    self.sampling  # noqa: B018 - raises where a number is out of range

  @property
  def sampling(self) -> Sampling:
    return Sampling(self.TEMPERATURE, self.TOP_K, self.TOP_P, self.REPETITION_PENALTY)
