"""Attributes that decide how an experiment's model continues text."""

import datetime
from typing import Literal

from paxlite.config.attribute_kinds import Count, Generation, NotNegativeInt, Run, Training
from paxlite.config.attributes import StoredPath, TextOrFile
from paxlite.config.generation import Sampling
from paxlite.core.errors import UserError
from paxlite.experiments.base import Experiment

_OF_TASKS = 'EVAL_TASKS_IN_TRAINING EVAL_CHAT EVAL_BATCH_TOKENS EVAL_TOO_LONG EVAL_SKIP_UNREADABLE'
_BESIDE = {'EVAL_TASKS': _OF_TASKS, 'SAMPLE_PROMPTS SAMPLE_PROMPT': 'SAMPLE_CHAT'}


class Decoding(Experiment, subject='Generation and zero-shot tasks', beside=_BESIDE):
  """Generation settings: in a run, in `--mode=decode`, and in zero-shot evaluation."""

  START_ID: Training[NotNegativeInt | None] = 0  # first token id of a text; None: the tokenizer's
  EOS_IDS: Generation[list[int]] = []  # ids of stop tokens; []: the tokenizer's

  DECODE_FILES: Run[list[StoredPath]] = []  # JSON lines of prompts or chats for --mode=decode
  DECODE_BATCH_SIZE: Generation[Count] = 32  # maximum prompts continued at once
  MAX_DECODE_STEPS: Generation[Count] = 128  # maximum new tokens
  TEMPERATURE: Generation[float] = 0.0  # sampling temperature; 0: the most likely token
  TOP_K: Generation[int] = 0  # most likely tokens to sample from; 0: all
  TOP_P: Generation[float] = 1.0  # probability mass to sample from; 1: all
  REPETITION_PENALTY: Generation[float] = 1.0  # divisor of earlier tokens' logits; 1: off
  GENERATION_CONFIG: Generation[
    dict
  ] = {}  # generation_config.json of imported weights, for exports
  CHAT_TEMPLATE: Generation[TextOrFile] = (
    ''  # Jinja chat template, or its file; '': the tokenizer's
  )
  CHAT_DATE: Generation[str] = ''  # date for a chat template; '': the run's first start
  CHAT_THINKING: Generation[bool | None] = (
    None  # enable_thinking of a chat template; None: as in training answers
  )
  INT8_WEIGHTS: Generation[bool] = (
    False  # int8 projections in evaluation and generation, one scale per output channel
  )

  KV_CACHE_DTYPE: Generation[Literal['int8', 'float8_e4m3fn'] | None] = (
    None  # 8-bit keys and values of commands that generate; None: the model's dtype
  )
  KV_CACHE_TOKENS: Generation[Count | None] = (
    None  # tokens of the KV cache, in pages that answers share; None: each has its own room
  )

  # lambada:FILE.jsonl, boolq:FILE.jsonl, or the .json file of a task
  EVAL_TASKS: Run[list[StoredPath]] = []  # zero-shot tasks of --mode=eval
  EVAL_TASKS_IN_TRAINING: Run[bool] = False  # evaluates EVAL_TASKS during training too
  EVAL_CHAT: Run[bool] = False  # asks zero-shot tasks through the chat template
  EVAL_BATCH_TOKENS: Run[Count] = 4096  # approximate tokens per zero-shot batch
  EVAL_TOO_LONG: Run[Literal['truncate', 'error']] = (
    'truncate'  # what to do with zero-shot examples longer than the context
  )
  EVAL_SKIP_UNREADABLE: Run[bool] = False  # skips and counts unreadable zero-shot records

  SAMPLE_PROMPTS: Run[list[str]] = []  # prompts to continue at each evaluation
  SAMPLE_PROMPT: Run[str | None] = None  # prompt to continue after training; None: none
  SAMPLE_CHAT: Run[bool | None] = None  # answers sample prompts as a chat; None: if it learns chats

  @property
  def gives_rewards(self) -> bool:
    """Whether the model gives a number for a text, and none for its next token."""
    return False

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
