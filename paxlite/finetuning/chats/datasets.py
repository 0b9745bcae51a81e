"""Prompts and answers, or chats, as a dataset: `class Mine(SftFiles, SmolLM135M)`."""

from collections.abc import Mapping
from typing import Literal

import fiddle as fdl

from paxlite.chats.chat_format import ChatFormat
from paxlite.config.attribute_kinds import Run, Training
from paxlite.config.attributes import AnyPath, StoredPath
from paxlite.config.templates import config
from paxlite.core.errors import UserError
from paxlite.data.base import RowArray
from paxlite.data.text import Split
from paxlite.data.tokenizer import tokenizer_file
from paxlite.experiments.rows import Rows, Tokenized, check_fraction
from paxlite.finetuning.chats.sft import AnswerRows, SftRows, TooLong


class SftFiles(Tokenized, Rows, subject='Data'):
  """Prompts and answers, packed, with loss only on the answers (see chats.sft and sft_formats)."""

  TRAIN_FILES: Run[list[StoredPath]] = []  # training files, or patterns such as data/*.jsonl
  EVAL_FILES: Training[list[StoredPath]] = []  # evaluation files
  EVAL_FRACTION: Training[float] = (
    0.0  # share of the examples that is held out for evaluation; 0: none
  )
  VOCAB_PATH: Run[StoredPath] = ''  # tokenizer; '': that of CHECKPOINT_RESTORE_PATH
  TOO_LONG: Training[TooLong] = 'error'  # what to do with an example longer than a sequence
  EXAMPLE_CACHE: Run[AnyPath] = (
    ''  # folder of tokenized examples; '': paxlite/examples in your cache folder; off: memory
  )
  SKIP_UNREADABLE: Run[bool] = False  # skips and counts unreadable records
  CHAT_EXAMPLES: Training[Literal['conversations', 'answers']] = (
    'conversations'  # one example per conversation, or per answer with its prompt
  )

  def validate(self) -> None:
    super().validate()
    check_fraction(self.EVAL_FRACTION)
    if self.EVAL_FRACTION and self.EVAL_FILES:
      raise UserError(
        'EVAL_FRACTION holds out part of TRAIN_FILES, but EVAL_FILES is also set: leave one out'
      )
    self.check_apart('EVAL_FILES', self.TRAIN_FILES, self.EVAL_FILES)

  @property
  def dataset(self) -> str:
    return 'prompts and answers'

  @property
  def learns_chats(self) -> bool:
    return True

  @property
  def reads_clock(self) -> bool:
    try:
      path = tokenizer_file(self.VOCAB_PATH or self._restored_tokenizer)
      return ChatFormat(self.CHAT_TEMPLATE, str(path)).reads_clock
    except (
      UserError
    ):  # reported where the data are read; pairs of prompt and answer need no template
      return False

  def train_input(self) -> fdl.Config:
    split: Split = 'train' if self.EVAL_FRACTION else 'all'
    return self.leaving_out(self.input(self._source(self.TRAIN_FILES, split)))

  def example_input(self) -> fdl.Config | None:
    return SftFiles.train_input(self)  # without the weights that a subclass asks for

  def eval_inputs(self) -> dict[str, fdl.Config]:
    if self.EVAL_FRACTION:
      return {'held_out': self.eval_input(self._source(self.TRAIN_FILES, 'held_out'))}
    if self.EVAL_FILES:
      return {'eval': self.eval_input(self._source(self.EVAL_FILES, 'all'))}
    return {}

  @property
  def row_values(self) -> Mapping[str, RowArray]:
    """Arrays of the rows that are computed before training, by their names."""
    return {}

  @property
  def _restored_tokenizer(self) -> str:
    weights = self.weights
    if weights.problem and not weights.tokenizer:  # reported before a missing tokenizer
      raise UserError(
        'CHECKPOINT_RESTORE_PATH, the source of the tokenizer without VOCAB_PATH: '
        f'{weights.problem}'
      )
    return weights.tokenizer or self.CHECKPOINT_RESTORE_PATH

  def _source(self, files: list[str], split: Split) -> fdl.Config:
    return config(
      AnswerRows if self.CHAT_EXAMPLES == 'answers' else SftRows,
      files=list(files),
      vocab_path=self.VOCAB_PATH or self._restored_tokenizer,
      vocab_size=self.VOCAB_SIZE,
      seq_len=self.MAX_SEQ_LEN,
      start_id=self.START_ID,
      eos_ids=list(self.EOS_IDS),
      chat_template=self.CHAT_TEMPLATE,
      date=self.CHAT_DATE,
      thinking=self.CHAT_THINKING,
      too_long=self.TOO_LONG,
      packed=self.PACKED_INPUT,
      split=split,
      held_out_share=self.EVAL_FRACTION,
      skip_unreadable=self.SKIP_UNREADABLE,
      values=dict(self.row_values),
      cache=self.EXAMPLE_CACHE,
    )
