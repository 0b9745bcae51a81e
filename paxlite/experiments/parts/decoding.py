"""Attributes that decide how an experiment's model continues text."""

import datetime
from typing import Literal

from paxlite.config.attribute_kinds import Count, Generation, NotNegativeInt, Run, Training
from paxlite.config.attributes import StoredPath
from paxlite.core.errors import UserError
from paxlite.experiments.base import Experiment
from paxlite.generation.decoding import Sampling


class Decoding(Experiment):
  """Attributes of every language model for `--mode=decode` and zero-shot evaluation."""

  # The token id at the start of every text; None: the one that the tokenizer adds
  START_ID: Training[NotNegativeInt | None] = 0  # id that a text begins with; None: the tokenizer's
  EOS_IDS: Generation[list[int]] = []  # token ids that end a text; empty: the tokenizer's

  DECODE_FILES: Run[list[StoredPath]] = []  # JSON lines with inputs or chat messages
  DECODE_BATCH_SIZE: Generation[Count] = 8  # prompts that are continued at a time
  MAX_DECODE_STEPS: Generation[Count] = 128  # tokens that are generated at most
  TEMPERATURE: Generation[float] = 0.0  # 0: the most likely token
  TOP_K: Generation[int] = 0  # 0: off
  TOP_P: Generation[float] = 1.0  # 1: off
  REPETITION_PENALTY: Generation[float] = 1.0  # 1: off
  CHAT_TEMPLATE: Generation[str] = ''  # a Jinja template; '': the tokenizer's
  CHAT_DATE: Generation[str] = ''  # day that a chat template sees; '': of a run's first start
  CHAT_THINKING: Generation[bool | None] = None  # enable_thinking; None: as in learned answers
  INT8_WEIGHTS: Generation[bool] = False  # quantizes projections, with one scale per output channel

  # For --mode=eval: lambada:FILE.jsonl, boolq:FILE.jsonl, or the .json file of a task
  EVAL_TASKS: Run[list[StoredPath]] = []  # zero-shot tasks of --mode=eval
  EVAL_CHAT: Run[bool] = False  # asks all tasks in a chat, by the chat template
  EVAL_BATCH_TOKENS: Run[Count] = 4096  # approximate number of tokens per batch
  EVAL_TOO_LONG: Run[Literal['truncate', 'error']] = 'truncate'  # texts too long for the model
  EVAL_SKIP_UNREADABLE: Run[bool] = False  # skips invalid records and counts them

  @property
  def continues_text(self) -> bool:
    """Whether the trained model can continue text, because its layers keep keys and values."""
    return True

  def validate(self) -> None:
    super().validate()
    self.sampling()
    try:
      datetime.date.fromisoformat(self.CHAT_DATE or '2000-01-01')
    except ValueError:
      raise UserError(
        f'CHAT_DATE={self.CHAT_DATE} must be a day, as 2026-11-26, or empty'
      ) from None

  def sampling(self) -> Sampling:
    """Returns how the next token is chosen; raises UserError if a number is out of range."""
    return Sampling(self.TEMPERATURE, self.TOP_K, self.TOP_P, self.REPETITION_PENALTY)
