"""Examples as arrays: the output of readers, and the input of sequences.

Token i of an example is ids[i] · 2, + 1 if it is learned, so that one read gets both.
"""

import collections
import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from paxlite.core.json_text import JsonObject
from paxlite.data.places import Place
from paxlite.data.refused_records import RefusedRecords
from paxlite.finetuning.chats.sft_warnings import ExampleWarnings
from paxlite.finetuning.example_cache import Arrays, ArrayWriter

LAZY = 'tokens', 'records'  # arrays of which only what is asked for is read


@dataclasses.dataclass(frozen=True)
class SftExample:
  """Token ids [n] and a mask [n] of those in the answer, which are learned.

  The identity is that of the record, whichever tokenizer and template have encoded it. A preference
  says what a loss takes the answer for: see preference_rows.py. The place is that of the record.
  """

  ids: np.ndarray
  is_answer: np.ndarray
  identity: int
  is_cut: bool = False
  preference: int = 0
  place: str = ''


class Notes:
  """A reader's notes on records, besides their examples.

  Attributes:
    refused: The records that cannot be read.
    warnings: What is odd.
    formats: Number of records by the keys of their format.
    has_pairs, has_chats: Whether an example is a prompt with its answer, or a conversation.
    num_tokens, num_unknown: Number of tokens, and of those that the tokenizer does not know.
  """

  def __init__(self) -> None:
    self.refused, self.warnings = RefusedRecords(), ExampleWarnings()
    self.formats: collections.Counter[str] = collections.Counter()
    self.has_pairs = self.has_chats = False
    self.num_tokens = self.num_unknown = 0

  def add(self, other: 'Notes') -> None:
    """Adds the notes on later records."""
    self.refused.add(other.refused)
    self.warnings.merge(other.warnings)
    self.formats.update(other.formats)
    self.has_pairs |= other.has_pairs
    self.has_chats |= other.has_chats
    self.num_tokens += other.num_tokens
    self.num_unknown += other.num_unknown

  def stated(self) -> JsonObject:
    """Returns the notes as JSON."""
    return vars(self) | {k: vars(getattr(self, k)) for k in ('refused', 'warnings')}

  @classmethod
  def of(cls, stated: Mapping[str, Any]) -> 'Notes':
    found = cls()
    vars(found).update({k: v for k, v in stated.items() if k not in ('refused', 'warnings')})
    found.formats = collections.Counter(found.formats)
    for name in ('refused', 'warnings'):
      vars(getattr(found, name)).update(stated[name])
    for name in ('counts', 'unread'):
      setattr(found.warnings, name, collections.Counter(stated['warnings'][name]))
    return found


@dataclasses.dataclass(frozen=True)
class EncodedBlock:
  """The examples of a block of records.

  Attributes:
    arrays: `tokens` of all examples, and of each: `length`, `first_learned`, its first target that
      is learned, `num_learned`, `identity`, `preference`, `source`, the number in sources, and
      `record`, that in the source or −1. A reader may add others.
    sources: The names of the sources.
    notes: What there is to say of the records.
  """

  arrays: dict[str, np.ndarray]
  sources: list[str]
  notes: Notes


def block_of(
  examples: Sequence[SftExample], notes: Notes, more: Mapping[str, np.ndarray] | None = None
) -> EncodedBlock:
  """Returns a block of examples."""
  sources: dict[str, int] = {}
  tokens: list[np.ndarray] = [np.zeros(0, np.uint32)]
  facts = []
  for e in examples:
    place, learned = Place.of(e.place), np.flatnonzero(e.is_answer[1:]) + 1
    tokens.append(e.ids.astype(np.uint32) << 1 | e.is_answer)
    source = sources.setdefault(place.source, len(sources))
    record = -1 if place.record is None else place.record
    first = int(learned[0]) if len(learned) else len(e.ids)
    count = int(e.is_answer.sum())
    facts.append((len(e.ids), first, count, e.identity, e.preference, source, record))
  names = 'length', 'first_learned', 'num_learned', 'identity', 'preference', 'source', 'record'
  of_each = np.array(facts, np.int64).reshape(-1, len(names)).T
  arrays = dict(zip(names, of_each, strict=True)) | {'tokens': np.concatenate(tokens)}
  return EncodedBlock(arrays | dict(more or {}), list(sources), notes)


def write_blocks(
  writer: ArrayWriter, blocks: Iterable[EncodedBlock], before: Notes | None = None
) -> JsonObject:
  """Appends blocks, of which there is at least one; returns the facts of EncodedExamples.

  Args:
    writer: Writes the arrays.
    blocks: The blocks.
    before: Notes to which those of the blocks are added.
  """
  sources: dict[str, int] = {}
  notes = before or Notes()
  for block in blocks:
    numbers = np.array([sources.setdefault(s, len(sources)) for s in block.sources], np.int64)
    writer.append(block.arrays | {'source': numbers[block.arrays['source']]})
    notes.add(block.notes)
  return {'sources': list(sources), 'notes': notes.stated()}


class EncodedExamples:
  """The examples of all records, whatever their lengths, with what there is to say of them.

  Attributes beyond the arrays of a block:
    notes: What there is to say of the records.
    key: What identifies the examples; None if they are not in files.
  """

  def __init__(self, found: Arrays, key: JsonObject | None = None):
    arrays, self.key = found.arrays, key if found.is_in_files else None
    self.tokens, self.length = arrays['tokens'], arrays['length']
    self.first_learned, self.num_learned = arrays['first_learned'], arrays['num_learned']
    self.identity, self.preference = arrays['identity'], arrays['preference']
    self.source, self.record = arrays['source'], arrays['record']
    self.more, self.sources = arrays, list(found.facts['sources'])
    self.notes = Notes.of(found.facts['notes'])
    self._ends = self.length.cumsum()

  def __len__(self) -> int:
    return len(self.length)

  def place(self, number: int) -> Place:
    record = int(self.record[number])
    return Place(self.sources[self.source[number]], None if record < 0 else record)

  def example(self, number: int, most: int) -> SftExample:
    """Returns an example, of which at most `most` tokens are left."""
    end, length = int(self._ends[number]), int(self.length[number])
    tokens = self.tokens[end - length : end - max(0, length - most)]
    identity, preference = int(self.identity[number]), int(self.preference[number])
    ids, is_answer = (tokens >> 1).astype(np.int32), (tokens & 1).astype(bool)
    is_cut, place = length > most, str(self.place(number))
    return SftExample(ids, is_answer, identity, is_cut, preference, place)

  def kept_record(self, number: int) -> bytes:
    """Returns the record of an example, as JSON, of a reader that keeps records."""
    end, size = int(self._record_ends[number]), int(self.more['record_bytes'][number])
    kept: bytes = self.more['records'][end - size : end].tobytes()
    return kept

  @functools.cached_property
  def _record_ends(self) -> np.ndarray:
    ends: np.ndarray = self.more['record_bytes'].cumsum()
    return ends
