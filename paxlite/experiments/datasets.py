"""Datasets as mixins: `class Synthetic126M(Synthetic, GPT126M)`."""

import itertools
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import fiddle as fdl

from paxlite import extensions
from paxlite.config.attribute_kinds import NotNegativeInt, Run, Training
from paxlite.config.attributes import StoredPath, attribute_types
from paxlite.config.templates import config
from paxlite.core import shell
from paxlite.core.errors import UserError
from paxlite.data import packaged
from paxlite.data.documents import DocumentSource, check_once
from paxlite.data.flat_tokens import FlatTokenRows
from paxlite.data.mixture import mixture_of
from paxlite.data.record_files import OF_RECORDS
from paxlite.data.rows import RowKind
from paxlite.data.synthetic import SyntheticRows
from paxlite.data.text import HELD_OUT_SHARE, Split, TextRows
from paxlite.experiments.rows import FromTfds, Rows, Splits, Tokenized, check_fraction
from paxlite.files.text_files import kind


class Synthetic(Rows):
  """Random tokens. The loss stays at ln VOCAB_SIZE, but speed and memory are realistic."""

  @property
  def dataset(self) -> str:
    return 'synthetic'

  def train_input(self) -> fdl.Config:
    source = config(
      SyntheticRows, vocab_size=self.VOCAB_SIZE, seq_len=self.MAX_SEQ_LEN, packed=self.PACKED_INPUT
    )
    return self.leaving_out(self.input(source))


class TextFiles(Tokenized, Rows, subject='Data'):
  """Text files (.txt, also .gz .xz .zst) with a tokenizer; 1 block in 20 is held out."""

  TRAIN_FILES: Run[list[StoredPath]] = []  # training files, or patterns such as data/*.jsonl
  EVAL_FILES: Training[list[StoredPath]] = []  # evaluation files
  EVAL_FRACTION: Training[float] = (
    0.05  # held-out share of the text if EVAL_FILES is empty; 0: none
  )

  def validate(self) -> None:
    super().validate()
    check_fraction(self.EVAL_FRACTION)
    self.check_apart('EVAL_FILES', self.TRAIN_FILES, self.EVAL_FILES)

  @property
  def dataset(self) -> str:
    return 'text files'

  def train_input(self) -> fdl.Config:
    split: Split = 'train' if self._holds_out else 'all'
    return self.leaving_out(self.input(self._source(self.TRAIN_FILES, split)))

  def eval_inputs(self) -> dict[str, fdl.Config]:
    if self.EVAL_FILES:
      return {'held_out': self.eval_input(self._source(self.EVAL_FILES, 'all'))}
    if self._holds_out:
      return {'held_out': self.eval_input(self._source(self.TRAIN_FILES, 'held_out'))}
    return {}

  @property
  def _holds_out(self) -> bool:
    return not self.EVAL_FILES and self.EVAL_FRACTION > 0

  def _source(self, files: list[str], split: Split) -> fdl.Config:
    return config(
      TextRows, files=list(files), vocab_path=self.VOCAB_PATH, seq_len=self.MAX_SEQ_LEN,
      split=split, rows=self.row_kind,
      held_out_share=self.EVAL_FRACTION if self._holds_out else HELD_OUT_SHARE,
      start_id=self.START_ID, eos_ids=list(self.EOS_IDS),
    )  # fmt: skip


class EmbeddedText(TextFiles):
  """The King James Bible and Shakespeare, which ship with paxlite, and their tokenizer."""

  TRAIN_FILES = packaged.TEXTS
  VOCAB_PATH = packaged.VOCAB
  VOCAB_SIZE = 8192

  @property
  def dataset(self) -> str:
    return 'embedded text'


class FlatTokens(Tokenized, Splits, subject='Data'):
  """A tokenized dataset in paxlite's format or seqax's format (see data.flat_tokens)."""

  DATASET_PATH: Run[StoredPath] = ''  # folder that paxlite tokenize wrote
  ROWS: Training[RowKind | None] = None  # how tokens become sequences; None: by PACKED_INPUT
  VOCAB_PATH: Run[StoredPath] = ''  # tokenizer of the tokens; '': that of CHECKPOINT_RESTORE_PATH

  @property
  def dataset(self) -> str:
    return 'flat tokens'

  @property
  def row_kind(self) -> RowKind:
    return self.ROWS or super().row_kind

  def train_input(self) -> fdl.Config:
    return self.leaving_out(self.input(self._source(self.TRAIN_SPLIT)))

  def eval_inputs(self) -> dict[str, fdl.Config]:
    if self.EVAL_SPLIT is None:
      return {}
    return {self.EVAL_SPLIT: self.eval_input(self._source(self.EVAL_SPLIT))}

  def _source(self, split: str) -> fdl.Config:
    if not self.DATASET_PATH:
      raise UserError('DATASET_PATH=/path/to/flat/tokens is missing')
    return config(
      FlatTokenRows, path=self.DATASET_PATH, split=split, seq_len=self.MAX_SEQ_LEN,
      rows=self.row_kind, start_id=self.START_ID,
      vocab_path=self.VOCAB_PATH or self.weights.tokenizer,
    )  # fmt: skip


class DocumentFiles(FromTfds, Rows, subject='Data'):
  """Documents that are tokenized during training: JSON, CSV, Parquet, TFDS, Hugging Face datasets.

  TRAIN_SOURCES are files, tfds:NAME:VERSION/SPLIT and hf:NAME:CONFIGURATION/SPLIT. EVAL_SOURCES are
  held out. If there are none, one document out of HELD_OUT_EVERY is held out.
  """

  TRAIN_SOURCES: Run[list[StoredPath]] = []  # training files, and tfds: and hf: datasets
  EVAL_SOURCES: Run[list[StoredPath]] = []  # evaluation files and datasets
  HELD_OUT_EVERY: Training[NotNegativeInt] = (
    200  # holds out every Nth document for evaluation; 0: none
  )
  TEXT_FIELD: Training[str] = 'text'  # record field with the text
  SKIP_UNREADABLE: Run[bool] = False  # skips records without text and logs their number

  @property
  def dataset(self) -> str:
    return 'documents'

  def validate(self) -> None:
    super().validate()
    if self.HELD_OUT_EVERY == 1:
      raise UserError('HELD_OUT_EVERY=1 would hold out all documents: 2 or more, or 0 for none')
    self.check_apart('EVAL_SOURCES', self.TRAIN_SOURCES, self.EVAL_SOURCES)

  def train_input(self) -> fdl.Config:
    split = 'train' if self._holds_out else 'all'
    return self.leaving_out(self._documents(self.TRAIN_SOURCES, split, self.batch_size))

  def eval_inputs(self) -> dict[str, fdl.Config]:
    if self._holds_out:
      held_out = self._documents(self.TRAIN_SOURCES, 'held_out', self.eval_batch_size)
      return {'held_out': held_out}
    if self.EVAL_SOURCES:
      return {'held_out': self._documents(self.EVAL_SOURCES, 'all', self.eval_batch_size)}
    return {}

  @property
  def _holds_out(self) -> bool:
    return not self.EVAL_SOURCES and self.HELD_OUT_EVERY > 0

  def _documents(self, names: list[str], split: str, batch_size: int) -> fdl.Config:
    source = config(
      DocumentSource, names=list(names), vocab_path=self.tokenizer_path, vocab_size=self.VOCAB_SIZE,
      field=self.TEXT_FIELD, start_id=self.START_ID, eos_ids=list(self.EOS_IDS), split=split,
      held_out_every=self.HELD_OUT_EVERY, skip_unreadable=self.SKIP_UNREADABLE,
      tfds_data_dir=self.TFDS_DATA_DIR,
    )  # fmt: skip
    return self.stream(source, self.stream_rows, batch_size)


class Mixture(FromTfds, Rows, subject='Data'):
  """A mixture of several datasets with weights.

  A source is a flat-tokens folder, text (.txt), seqio:TASK, sft:FILE.jsonl, or documents as in
  DocumentFiles. Each source holds out the same data as it would alone.
  """

  SOURCES: Training[list[StoredPath]] = []  # datasets of a mixture
  WEIGHTS: Training[list[float]] = []  # weights of a mixture's datasets; any sum
  TRAIN_SPLIT: Training[str] = 'train'  # split of the datasets to train on
  EVAL_SPLIT: Run[str | None] = 'validation'  # split of the datasets to evaluate on; None: none
  HELD_OUT_EVERY: Training[NotNegativeInt] = (
    200  # holds out every Nth document for evaluation; 0: none
  )
  TEXT_FIELD: Training[str] = 'text'  # record field with the text
  SKIP_UNREADABLE: Training[bool] = False  # leaves out invalid records and counts them
  SEQIO_MODULES: Training[list[str]] = []  # Python modules that register SeqIO tasks

  @property
  def dataset(self) -> str:
    return 'a mixture'

  @property
  def learns_chats(self) -> bool:
    return any(each.learns_chats for each in self._experiments)

  @property
  def reads_clock(self) -> bool:
    return any(each.reads_clock for each in self._experiments)

  def validate(self) -> None:
    super().validate()
    if len(self.SOURCES) != len(self.WEIGHTS) or not self.SOURCES:
      raise UserError(
        f'{len(self.SOURCES)} SOURCES have {len(self.WEIGHTS)} WEIGHTS: '
        f'{shell.flags({"SOURCES": ["a", "b"], "WEIGHTS": [0.7, 0.3]})}'
      )
    check_once(self.SOURCES)
    for each in self._experiments:
      each.validate()

  def train_input(self) -> fdl.Config:
    mixture = config(
      mixture_of, inputs=[each.train_input() for each in self._experiments],
      weights=list(self.WEIGHTS), batch_size=self.batch_size, seed=self.SEED,
    )  # fmt: skip
    return self.leaving_out(mixture)

  def eval_inputs(self) -> dict[str, fdl.Config]:
    return {
      f'{source}_{name}': eval_input
      for source, each in zip(short_names(self.SOURCES), self._experiments, strict=True)
      for name, eval_input in each.eval_inputs().items()
    }

  @property
  def _experiments(self) -> list[Rows]:
    return [self._experiment(source) for source in self.SOURCES]

  def _experiment(self, source: str) -> Rows:
    dataset, attributes = _dataset_of(source)
    if 'SEQIO_TASK' in attributes:
      attributes['SEQIO_ROWS'] = self.stream_rows
    if dataset is TextFiles and not self.HELD_OUT_EVERY:
      attributes['EVAL_FRACTION'] = 0.0
    mine = self.values() | {'LEAVE_OUT': ''}  # the mixture leaves out the records of all
    shared = {name: mine[name] for name in attribute_types(dataset).keys() & mine.keys()}
    return dataset(**shared | attributes)


def short_names(sources: Sequence[str]) -> list[str]:
  """Returns names of sources for metrics: wiki for data/wiki.jsonl; each name is another one."""
  names: list[str] = []
  for source in sources:
    name = source.removeprefix('sft:')
    if name.startswith(('hf:', 'tfds:', 'seqio:')):
      last = '_'.join(name.partition(':')[2].split('/')[-2:])  # c4_en_train
    else:
      last = pathlib.PurePath(name).name.partition('.')[0]
    short = re.sub(r'[^A-Za-z0-9_-]+', '_', last).strip('_') or 'source'
    candidates = itertools.chain([short], (f'{short}_{i}' for i in itertools.count(2)))
    names.append(next(candidate for candidate in candidates if candidate not in names))
  return names


def _dataset_of(source: str) -> tuple[type[Rows], dict[str, object]]:
  """Returns the mixin that reads a source, and the attributes that name the source."""
  name = source.partition(':')[2]
  if source.startswith('seqio:'):
    return extensions.hook('SeqioTask'), {'SEQIO_TASK': name}
  if source.startswith('sft:'):
    return extensions.hook('SftFiles'), {'TRAIN_FILES': [name]}
  if source.startswith(('hf:', 'tfds:')) or kind(source) in OF_RECORDS:
    return DocumentFiles, {'TRAIN_SOURCES': [source]}
  if kind(source) == '.txt':
    return TextFiles, {'TRAIN_FILES': [source]}
  return FlatTokens, {'DATASET_PATH': source}


def __getattr__(name: str) -> Any:
  """Returns a dataset that is a hook of an extension, such as SftFiles."""
  if missing := extensions.missing(name):
    try:
      return extensions.hook(name)
    except UserError:
      raise ImportError(missing) from None
  raise AttributeError(f'module {__name__} has no attribute {name!r}')
