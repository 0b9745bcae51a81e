"""Counts records that are valid and that nobody is likely to have meant, for `paxlite data`."""

import itertools
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence

from paxlite.core.errors import UserError
from paxlite.core.fields import Fields
from paxlite.core.json_text import Json
from paxlite.data.conversations import Conversation
from paxlite.data.places import Place
from paxlite.data.record_files import Raw, Record
from paxlite.data.records import parsed, raw_records, text_of
from paxlite.data.refused_records import RefusedRecords
from paxlite.data.sft_formats import Pair, check_unread
from paxlite.data.tokenizer import Tokenizer

_MOST_RECORDS = 100_000  # that are looked at
_SHORTEST_MARK = 3  # characters of a special token that no text has by chance

EMPTY = 'a text that is empty'
NO_ANSWER = 'no answer, which a run refuses'
BLANK_ANSWER = 'an answer that is empty'
OPEN = 'a last message that is not an answer, of which nothing is learned'
SAME = 'the same as an earlier record'
TWICE = 'the same as a record of another file'
MARKED = 'a special token of the tokenizer within the text'


class Oddities:
  """Counts oddities by kind, with the place of the first one.

  Attributes:
    refused: The documents that cannot be read. Those that are examples for fine-tuning are passed
      over, because their rows name them.

  Args:
    tokenizer: The tokenizer whose special tokens are looked for; None: none is.
    field: The field of documents; '' if the records are examples for fine-tuning.
    contents_of: Returns the examples of a record for fine-tuning, or raises UserError;
      None: the records are documents.
  """

  def __init__(
    self,
    tokenizer: Tokenizer | None,
    field: str = '',
    contents_of: Callable[[Fields], list[Pair | Conversation]] | None = None,
  ):
    self._field = field
    self._contents_of = contents_of
    self._marks = special_token_strings(tokenizer) if tokenizer is not None else []
    self._seen: dict[int, str] = {}  # the first place of each record
    self._counts: dict[str, int] = {}
    self._first: dict[str, str] = {}
    self.refused = RefusedRecords()

  def read(self, files: Sequence[str]) -> None:
    """Looks at the first records of files, as many of each, so that copies of files are noticed."""
    most = -(-_MOST_RECORDS // max(1, len(files)))
    for place, raw in itertools.chain.from_iterable(
      itertools.islice(raw_records(file), most) for file in files
    ):
      record = self.refused.attempt(self._record, place, raw)
      if record is not None:
        self.look_at(place, record)

  def _record(self, place: str, raw: Raw) -> Record:
    record = parsed(raw, place)
    if self._field:
      text_of(record, self._field, place)
    return record

  def look_at(self, place: str, record: Record) -> None:
    """Counts what is odd in a record."""
    for kind, detail in self._found(place, record):
      self._counts[kind] = self._counts.get(kind, 0) + 1
      self._first.setdefault(kind, f'{place}{detail}')

  def lines(self) -> list[str]:
    """Returns a line for each kind, the most frequent one first."""
    kinds = sorted(self._counts, key=lambda kind: -self._counts[kind])
    return [f'{self._counts[kind]:,} × {kind}; the first: {self._first[kind]}' for kind in kinds]

  def _found(self, place: str, record: Record) -> Iterator[tuple[str, str]]:
    """Yields the kinds of what is odd in a record, with details."""
    texts = list(_texts(record.get(self._field) if self._field else dict(record)))
    identity = zlib.crc32(json.dumps(texts).encode()) << 32 | zlib.adler32(str(texts).encode())
    first = self._seen.setdefault(identity, place)
    if first != place:
      is_other = Place.of(first).source != Place.of(place).source
      yield (TWICE, f' is {first}') if is_other else (SAME, '')
    if mark := next((m for m in self._marks if any(m in text for text in texts)), ''):
      yield MARKED, f' has {mark}'
    if self._field:
      if not any(text.strip() for text in texts):
        yield EMPTY, ''
      return
    assert self._contents_of is not None
    fields = Fields(record)
    try:
      examples = self._contents_of(fields)
      check_unread(fields, examples)
    except UserError:
      return
    for contents in examples:
      if not isinstance(contents, Pair):
        yield from _found_in_chat(contents)
      elif not contents.targets.strip():
        yield BLANK_ANSWER, ''


def _found_in_chat(chat: Conversation) -> Iterator[tuple[str, str]]:
  learned = [chat.messages[i] for i in chat.learned]
  if not learned:
    yield NO_ANSWER, ''
    return
  if any(not any(t.strip() for t in _texts(m.get('content'))) and not m.get('tool_calls')
         for m in learned):  # fmt: skip
    yield BLANK_ANSWER, ''
  if chat.messages[-1]['role'] != 'assistant':
    yield OPEN, f' ends with a message of the {chat.messages[-1]["role"]}'


def special_token_strings(tokenizer: Tokenizer) -> list[str]:
  """Returns the special tokens of a tokenizer as they are spelled in its templates."""
  texts = (tokenizer.decode_marked([i]).strip() for i in sorted(tokenizer.special_ids))
  return [text for text in texts if len(text) >= _SHORTEST_MARK]


def _texts(value: Json | Mapping[str, Json]) -> Iterator[str]:
  """Yields all texts in a value of JSON."""
  if isinstance(value, str):
    yield value
  elif isinstance(value, Mapping):
    for part in value.values():
      yield from _texts(part)
  elif isinstance(value, list):
    for part in value:
      yield from _texts(part)
