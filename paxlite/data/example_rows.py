"""Rows that hold examples, of which a part is learned, such as prompts with their answers."""

import abc
import collections
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from paxlite.data.base import RowSource
from paxlite.data.places import Place
from paxlite.data.refused_records import LongRecords, RefusedRecords
from paxlite.data.tokenizer import Tokenizer


class TokenExample(Protocol):
  """Token ids [n] and a mask [n] of those that are learned."""

  @property
  def ids(self) -> np.ndarray: ...

  @property
  def is_answer(self) -> np.ndarray: ...


class ExampleRows(RowSource):
  """A RowSource of examples, which says what a run and `paxlite data` tell of them.

  Attributes beyond RowSource's:
    seq_len: Length T of a row.
    files: The names of the files and datasets.
    tokenizer: The tokenizer.
    too_long: What is done with examples that are too long.
    lengths: Number of tokens of each record, without the first of an example, which is no target
      [n].
    num_records: Number of records.
    num_examples: Number of examples.
    num_learned: Number of tokens that are learned.
    num_cut: Number of examples that are cut.
    num_skipped: Number of examples of all splits that are left out, because they are too long.
    long: Examples of all splits that are too long.
    refused: Records of all splits that cannot be read.
    formats: Number of records of all splits by the keys of their format.
    has_chats: Whether one of them is a conversation, which a chat template writes.
    examples_of_a_record: So many examples are of one record, and are learned together.
    num_documents: Number of examples.
    left_out: Numbers of the examples that are padding; see run_data/left_out.py.
    noun: What a record is called, in the singular.
    thinking: False if all answers follow the prompt of a template whose thinking is turned off,
      although that is not its default; None otherwise.
  """

  seq_len: int
  files: list[str]
  tokenizer: Tokenizer
  too_long: str
  lengths: np.ndarray
  num_learned: int
  num_cut: int
  num_skipped: int
  long: LongRecords
  refused: RefusedRecords
  formats: collections.Counter[str]
  has_chats: bool
  thinking: bool | None
  examples_of_a_record = 1
  noun = 'example'
  left_out: frozenset[int] = frozenset()

  @abc.abstractmethod
  def example(self, number: int) -> TokenExample:
    """Returns an example by its number."""

  @abc.abstractmethod
  def leave_out(self, places: Sequence[Place]) -> list[Place]:
    """Makes padding of the examples that are among `places`; returns those that are."""

  @property
  @abc.abstractmethod
  def num_examples(self) -> int: ...

  @property
  @abc.abstractmethod
  def num_records(self) -> int: ...

  @property
  def num_documents(self) -> int:
    return self.num_examples
