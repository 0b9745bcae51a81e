"""Readers of records: they turn each into its examples, and note what is odd in it."""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from paxlite.chats.chat_encoding import ChatEncoding, Encoded
from paxlite.chats.conversations import Conversation
from paxlite.chats.sft_formats import LABELS, Pair, check_unread, format_of, identity
from paxlite.core.errors import UserError, located
from paxlite.core.fields import Fields
from paxlite.data.record_files import Raw, Record
from paxlite.data.records import parsed
from paxlite.data.tokenizer import Tokenizer, open_tokenizer
from paxlite.finetuning.chats.encoded_examples import EncodedBlock, Notes, SftExample, block_of


class SftReader:
  """Reads a record as one example, with loss on its answers."""

  examples_of_a_record = 1
  notes_labels = True

  def __init__(self, encoding: ChatEncoding):
    self.encoding, self.notes = encoding, Notes()

  def block(self, records: Iterable[tuple[str, Raw]]) -> EncodedBlock:
    """Returns the examples of records, each of which comes with its place.

    Raises:
      RecordlessError: No record can be read, for one reason.
    """
    self.notes, before = Notes(), (self.encoding.num_tokens, self.encoding.num_unknown)
    found: list[SftExample] = []
    for place, raw in records:
      found += self.notes.refused.attempt(self.read, place, raw) or []
    self.notes.num_tokens = self.encoding.num_tokens - before[0]
    self.notes.num_unknown = self.encoding.num_unknown - before[1]
    return block_of(found, self.notes)

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
    if len(ends) and not np.isin(ends, self.encoding.chat_eos_ids).any():
      self.notes.warnings.note('endless')
    return encoded


class AnswerReader(SftReader):
  """Reads each answer of a record as an example; those of a conversation are held out together."""

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
    return self.reader(encoding)
