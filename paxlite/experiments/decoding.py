"""How an experiment's model continues text."""

from typing import Literal

from paxlite.core.attribute_kinds import Count, Generation, Run, Training
from paxlite.core.attributes import LocalPath
from paxlite.experiments.base import Experiment
from paxlite.generation.decoding import Sampling


class Decoding(Experiment):
  """Attributes of `--mode=decode` and of zero-shot evaluation, of every language model."""

  # The id that text begins with for the model; None: what its tokenizer begins with
  START_ID: Training[int | None] = 0
  EOS_IDS: Generation[list[int]] = []  # ids that end a text; none: the tokenizer's

  DECODE_FILES: Run[list[LocalPath]] = []  # JSON lines with inputs, or with chat messages
  DECODE_BATCH_SIZE: Generation[Count] = 8
  MAX_DECODE_STEPS: Generation[Count] = 128
  TEMPERATURE: Generation[float] = 0.0  # 0: the likeliest token
  TOP_K: Generation[int] = 0  # 0: off
  TOP_P: Generation[float] = 1.0  # 1: off
  REPETITION_PENALTY: Generation[float] = 1.0  # 1: off
  CHAT_TEMPLATE: Generation[str] = ''  # of Jinja; '': the one that comes with the tokenizer
  INT8_WEIGHTS: Generation[bool] = False  # of the projections, a scale for each output channel

  # For --mode=eval: lambada:FILE.jsonl, boolq:FILE.jsonl, or the .json file of a task
  EVAL_TASKS: Run[list[LocalPath]] = []
  EVAL_BATCH_TOKENS: Run[Count] = 4096  # of a batch of such a task, about
  EVAL_TOO_LONG: Run[Literal['truncate', 'error']] = 'truncate'  # a text that the model cannot take
  EVAL_SKIP_UNREADABLE: Run[bool] = False  # records that are none are left out, and counted

  @property
  def continues_text(self) -> bool:
    """Whether the model that is trained continues text: its layers keep keys and values."""
    return True

  @property
  def eval_tasks(self) -> list[str]:
    return self.EVAL_TASKS

  def validate(self) -> None:
    super().validate()
    self.sampling()

  def sampling(self) -> Sampling:
    """How the next token is chosen; UserError where a number is out of range."""
    return Sampling(self.TEMPERATURE, self.TOP_K, self.TOP_P, self.REPETITION_PENALTY)
