"""Shared by datasets of experiments: sequences of tokens, a tokenizer, and held-out data."""

import os
from collections.abc import Sequence

import fiddle as fdl

from paxlite import extensions
from paxlite.config.attribute_kinds import Count, Run, Training
from paxlite.config.attributes import AnyPath, StoredPath
from paxlite.config.templates import config
from paxlite.core.errors import UserError
from paxlite.data.base import RowInput
from paxlite.data.records import canonical
from paxlite.data.rows import RowKind
from paxlite.data.streams import StreamInput, StreamRows
from paxlite.experiments.base import Experiment
from paxlite.experiments.language_model import LanguageModel
from paxlite.files.text_files import expanded


def check_fraction(fraction: float) -> None:
  """Raises UserError if EVAL_FRACTION is not a fraction of data that can be held out."""
  if fraction and not 1e-9 <= fraction <= 0.5:
    raise UserError(f'EVAL_FRACTION={fraction:g} must be 0, or from 1e-9 to 0.5')


class Rows(LanguageModel, subject='Data'):
  """Rows of tokens, and batches of them for training and evaluation."""

  EVAL_BATCH_SIZE: Run[Count | None] = (
    None  # sequences per global evaluation batch; None: as in training
  )

  LEAVE_OUT: Run[StoredPath] = (
    ''  # file of records to leave out, FILE:RECORD per line (paxlite data --without)
  )

  def leaving_out(self, data: fdl.Config) -> fdl.Config:
    """Returns the config of an input that leaves the records out which LEAVE_OUT names."""
    if not self.LEAVE_OUT:
      return data
    return config(extensions.hook('LEAVE_OUT'), data=data, path=self.LEAVE_OUT)

  def example_input(self) -> fdl.Config | None:
    """Returns the config of training data that are examples, which need no weights here.

    None: they are documents.
    """
    return None

  @property
  def prompts(self) -> fdl.Config | None:
    """The prompts whose answers the model generates; None: the data are no such prompts."""
    return None

  def check_apart(self, name: str, train: Sequence[str], held_out: Sequence[str]) -> None:
    """Raises UserError if a file is used both for training and for evaluation."""
    if not (train and held_out):
      return  # datasets of the Hub would be copied for nothing
    apart = [set(map(canonical, expanded(names, strict=False))) for names in (train, held_out)]
    for both in sorted(apart[0] & apart[1]):
      raise UserError(f'{name}: {both} is used for training and evaluation: name another, or none')

  @property
  def row_kind(self) -> RowKind:
    return self.stream_rows

  @property
  def stream_rows(self) -> StreamRows:
    return 'packed' if self.PACKED_INPUT else 'stream'

  def input(self, source: fdl.Config) -> fdl.Config:
    return config(RowInput, source=source, batch_size=self.batch_size, seed=self.SEED)

  def eval_input(self, source: fdl.Config) -> fdl.Config:
    return config(
      RowInput, source=source, batch_size=self.eval_batch_size, seed=self.SEED,
      max_eval_batches=self.MAX_EVAL_BATCHES,
    )  # fmt: skip

  @property
  def eval_batch_size(self) -> int:
    return self.batch_size if self.EVAL_BATCH_SIZE is None else self.EVAL_BATCH_SIZE

  def stream(self, source: fdl.Config, rows: StreamRows, batch_size: int) -> fdl.Config:
    """Returns the config of an input whose source is read from its beginning."""
    return config(
      StreamInput, source=source, seq_len=self.MAX_SEQ_LEN, batch_size=batch_size, rows=rows,
      seed=self.SEED, max_eval_batches=self.MAX_EVAL_BATCHES,
    )  # fmt: skip


class Splits(Rows):
  """Rows of a dataset that has splits."""

  TRAIN_SPLIT: Training[str] = 'train'  # training split
  EVAL_SPLIT: Run[str | None] = 'validation'  # evaluation split; None: none

  def validate(self) -> None:
    super().validate()
    if self.TRAIN_SPLIT == self.EVAL_SPLIT:
      raise UserError(
        f'EVAL_SPLIT: {self.EVAL_SPLIT} is used for training and evaluation: name another, or None'
      )


class Tokenized(Experiment, subject='Data'):
  """Text data, which has a tokenizer."""

  VOCAB_PATH: Run[StoredPath] = ''  # tokenizer file, or Hugging Face folder

  @property
  def tokenizer_path(self) -> str:
    return self.VOCAB_PATH


class FromTfds(Tokenized):
  """Text that may come from TFDS datasets."""

  TFDS_DATA_DIR: Run[AnyPath] = ''  # folder of TFDS datasets

  @property
  def tokenizer_path(self) -> str:
    return self.VOCAB_PATH or os.environ.get('VOCAB_PATH', '')
