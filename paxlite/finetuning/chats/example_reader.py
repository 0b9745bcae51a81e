"""Readers that turn each record into its examples and note oddities."""

import contextlib
import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from paxlite.chats.chat_encoding import ChatEncoding, Encoded
from paxlite.chats.conversations import Conversation, Tool
from paxlite.chats.sft_formats import LABELS, Pair, check_unread, format_of, identity
from paxlite.core.errors import UserError, located
from paxlite.core.fields import Fields
from paxlite.data.record_files import Raw, Record
from paxlite.data.records import Records, open_records, parsed
from paxlite.data.tokenizer import Tokenizer, open_tokenizer
from paxlite.finetuning.chats.encoded_examples import EncodedBlock, Notes, SftExample, block_of


class SftReader:
  """Reads a record as one example, with loss on its answers."""

  examples_of_a_record = 1
  notes_labels = True

  def __init__(self, encoding: ChatEncoding, most_tokens: int = 0, tools: Sequence[Tool] = ()):
    self.encoding, self.notes, self.most_tokens = encoding, Notes(), most_tokens
    self.tools = tools  # besides those of a record

  @staticmethod
  def open(name: str) -> Records:
    """Opens a source."""
    return open_records(name)

  def block(self, records: Iterable[tuple[str, Raw]]) -> EncodedBlock:
    """Returns the examples of records, each of which comes with its place.

    Raises:
      RecordlessError: No record can be read, for one reason.
    """
    found: list[SftExample] = []
    with self.noting():
      for place, raw in records:
        found += self.notes.refused.attempt(self.read, place, raw) or []
    return block_of(found, self.notes)

  @contextlib.contextmanager
  def noting(self) -> Iterator[None]:
    """A context that begins new notes, and counts the tokens in them."""
    self.notes, encoding = Notes(), self.encoding
    tokens, unknown = encoding.num_tokens, encoding.num_unknown
    yield
    self.notes.num_tokens = encoding.num_tokens - tokens
    self.notes.num_unknown = encoding.num_unknown - unknown

  def read(self, place: str, raw: Raw) -> list[SftExample]:
    """Returns the examples of a record; UserError if it cannot be read."""
    contents = self._contents(place, parsed(raw, place))
    return [self.example(place, each) for each in contents]

  def _contents(self, place: str, record: Record) -> list[Pair | Conversation]:
    """Returns the examples of a record, not yet encoded, and notes what it has besides."""
    fields = Fields(record)
    with located(place):
      if self.notes_labels and fields.one_of(*LABELS) is not None:
        self.notes.warnings.note('labelled', place)
      found = self.contents_of(fields)
      self.notes.warnings.note_unread(check_unread(fields, found))
    self.notes.formats[self.format_of(fields)] += 1
    return found

  @staticmethod
  def contents_of(record: Fields) -> list[Pair | Conversation]:
    """Returns the examples of a record, not yet encoded; UserError if it is in no known format."""
    return [format_of(record).read(record)]

  @staticmethod
  def format_of(record: Fields) -> str:
    return ' and '.join(format_of(record).keys)

  def example(self, place: str, contents: Pair | Conversation) -> SftExample:
    encoded = self.encoded(place, contents)
    self.notes.warnings.add(place, encoded)
    return SftExample(encoded.ids, encoded.is_learned, identity(contents), place=place)

  def encoded(self, place: str, contents: Pair | Conversation) -> Encoded:
    if isinstance(contents, Conversation):
      self.encoding.check_template(place)
    with located(place):
      if isinstance(contents, Pair):
        self.notes.has_pairs = True
        encoded = self.encoding.pair(*contents)
      else:
        self.notes.has_chats = True
        encoded = self._chat(contents)
    empty = isinstance(contents, Pair) and not contents.targets  # its EOS would be learned
    if empty or not encoded.is_learned[1:].any():
      raise UserError(f'{place} has no answer to learn')
    return encoded

  def _chat(self, chat: Conversation) -> Encoded:
    encoded = self.encoding.chat(chat)
    ends = encoded.ids[encoded.is_learned]
    if len(ends) and not (ends[:, None] == np.array(self.encoding.chat_eos_ids)).any():
      self.notes.warnings.note('endless')
    return encoded


class KeepingReader(SftReader):
  """A reader that keeps the record of each example, as JSON."""

  def block(self, records: Iterable[tuple[str, Raw]]) -> EncodedBlock:
    self._kept: list[bytes] = []
    found = super().block(records)
    kept: dict[str, np.ndarray] = {
      'record_bytes': np.array([len(record) for record in self._kept], np.int64),
      'records': np.frombuffer(b''.join(self._kept), np.uint8),
    }
    return dataclasses.replace(found, arrays=found.arrays | kept)

  def keep(self, record: Record) -> None:
    """Keeps the record of the next example."""
    self._kept.append(json.dumps(dict(record), default=str).encode())


class AnswerReader(SftReader):
  """Reads each answer of a record as an example; a conversation is held out as a whole."""

  def read(self, place: str, raw: Raw) -> list[SftExample]:
    (whole,) = self._contents(place, parsed(raw, place))
    of_answers = [self.example(place, part) for part in answers_of(whole)]
    return [dataclasses.replace(example, identity=identity(whole)) for example in of_answers]


def answers_of(contents: Pair | Conversation) -> list[Pair | Conversation]:
  """Returns the beginning of a conversation up to each answer, of which that is to be learned."""
  if isinstance(contents, Pair):
    return [contents]
  numbers = contents.learned
  if not numbers:
    return [contents]  # which is refused like any conversation without an answer
  cut = lambda i: dataclasses.replace(
    contents, messages=contents.messages[: i + 1], first_learned=i, as_asked=True
  )
  return [cut(i) for i in numbers]


@dataclasses.dataclass(frozen=True)
class ReaderOptions:
  """A reader of records, and the arguments of its ChatEncoding.

  It can be sent to other processes, which open the reader.
  """

  reader: type[SftReader]
  vocab_path: str
  vocab_size: int
  start_id: int | None
  eos_ids: Sequence[int]
  chat_template: str
  date: str
  thinking: bool | None
  most_tokens: int = 0
  tools: Sequence[Tool] = ()

  def opened(self, tokenizer: Tokenizer | None = None) -> SftReader:
    """Returns the reader, with the tokenizer if it is open already."""
    encoding = ChatEncoding(
      tokenizer or open_tokenizer(self.vocab_path),
      self.vocab_size,
      self.start_id,
      self.eos_ids,
      self.chat_template,
      self.date,
      self.thinking,
    )
    return self.reader(encoding, self.most_tokens, self.tools)
