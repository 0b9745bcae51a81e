"""Counts records that are valid but probably mistakes, for `paxlite data`."""

import itertools
import json
import zlib
from collections.abc import Callable, Iterator, Sequence

from paxlite.core.fields import Fields
from paxlite.core.json_text import texts_in
from paxlite.data.places import Place
from paxlite.data.record_files import Raw, Record
from paxlite.data.records import parsed, raw_records, text_of
from paxlite.data.refused_records import RefusedRecords
from paxlite.data.tokenizer import Tokenizer

_MOST_RECORDS = 100_000  # that are looked at
_SHORTEST_MARK = 3  # characters of a special token that no text has by chance

EMPTY = 'a text that is empty'
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
    odd_in: Yields the kinds of what is odd in the examples of a record, with details; None: the
      records are documents.
  """

  def __init__(
    self,
    tokenizer: Tokenizer | None,
    field: str = '',
    odd_in: Callable[[Fields], Iterator[tuple[str, str]]] | None = None,
  ):
    self._field = field
    self._odd_in = odd_in
    self._marks = special_token_strings(tokenizer) if tokenizer is not None else []
    self._seen: dict[int, str] = {}  # the first place of each record
    self._counts: dict[str, int] = {}
    self._first: dict[str, str] = {}
    self.refused = RefusedRecords()

  def read(self, files: Sequence[str]) -> None:
    """Reads equally many first records of each file, so that copies of files are noticed."""
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
    """Counts the oddities of a record."""
    for kind, detail in self._found(place, record):
      self._counts[kind] = self._counts.get(kind, 0) + 1
      self._first.setdefault(kind, f'{place}{detail}')

  def lines(self) -> list[str]:
    """Returns a line for each kind, the most frequent one first."""
    kinds = sorted(self._counts, key=lambda kind: -self._counts[kind])
    return [f'{self._counts[kind]:,} × {kind}; the first: {self._first[kind]}' for kind in kinds]

  def _found(self, place: str, record: Record) -> Iterator[tuple[str, str]]:
    """Yields the kinds of oddities in a record, with details."""
    texts = list(texts_in(record.get(self._field) if self._field else dict(record)))
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
    assert self._odd_in is not None
    yield from self._odd_in(Fields(record))


def special_token_strings(tokenizer: Tokenizer) -> list[str]:
  """Returns the special tokens of a tokenizer as they are spelled in its templates."""
  texts = (tokenizer.decode_marked([i]).strip() for i in sorted(tokenizer.special_ids))
  return [text for text in texts if len(text) >= _SHORTEST_MARK]
