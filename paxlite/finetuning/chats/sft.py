"""Supervised fine-tuning: packed prompts and answers, with the loss on the answers."""

import collections
import dataclasses
import itertools
import logging
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import numpy as np

from paxlite.chats.chat_encoding import ChatEncoding, Encoded
from paxlite.chats.conversations import Conversation
from paxlite.chats.sft_formats import LABELS, Pair, check_unread, format_of, identity
from paxlite.core.errors import UserError, located
from paxlite.core.fields import Fields
from paxlite.core.wording import amount
from paxlite.data.base import Batch, RowArray
from paxlite.data.example_rows import ExampleRows
from paxlite.data.held_out import held_out
from paxlite.data.places import Place
from paxlite.data.record_files import Raw, Record
from paxlite.data.records import canonical, parsed, raw_records
from paxlite.data.refused_records import LongRecords, RefusedRecords
from paxlite.data.tokenizer import check_vocabulary, open_tokenizer
from paxlite.files.text_files import expanded
from paxlite.finetuning.chats import sft_warnings
from paxlite.finetuning.chats.sft_warnings import ExampleWarnings

log = logging.getLogger('paxlite')

TooLong = Literal['error', 'skip', 'truncate']
Split = Literal['all', 'train', 'held_out']


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


class SftRows(ExampleRows):
  """A RowSource of examples; several share a row, and no token attends to another example.

  The module sft_formats reads a record as a prompt and its answer, or as a conversation. The model
  learns the answer and the EOS after it; of a conversation, it learns the assistant's messages and
  tool calls, ended as the chat template ends them.

  Args:
    files: Files of records, or other sources that the module records can read.
    vocab_path: Path of the tokenizer.
    seq_len: Length T of a row.
    vocab_size, start_id, eos_ids, chat_template, date, thinking: See ChatEncoding.
    too_long: What to do with examples of more than T + 1 tokens: refuse them, leave them out, or
      cut off their end. A cut example without an answer is left out.
    packed: Whether examples share rows.
    split: 'train' leaves out the examples that 'held_out' reads; 'all' reads every example.
    held_out_share: Share of the examples that is held out on average, at least one; see
      held_out.py.
    skip_unreadable: Whether records that cannot be read are left out.
    values: Arrays [T, …] of each row that are put into row_values after this, by their names.

  Attributes beyond those of ExampleRows:
    fingerprint: A checksum of the records, whichever tokenizer and template have encoded them.
    tokens_fingerprint: A checksum of the tokens and of what is learned of them.
    rows_fingerprint: A checksum of which examples each row has, and of its length.
    warnings: What a person should know of the examples, a line each.
    holds_out: Whether the examples are a part of those in the files.
    row_values: Arrays [rows, T, …] by name, which batches have too; NaN, or −1, until they are
      replaced.

  Raises:
    UserError: Records are in no known format, have no answer, or are too long. The message names
      the file and the line of the first.
  """

  _ways_out = 'TOO_LONG=skip or truncate'  # where examples are too long

  def __init__(
    self,
    files: Sequence[str],
    vocab_path: str,
    seq_len: int,
    vocab_size: int,
    start_id: int | None = None,
    eos_ids: Sequence[int] = (),
    chat_template: str = '',
    date: str = '',
    thinking: bool | None = None,
    too_long: TooLong = 'error',
    packed: bool = True,
    split: Split = 'all',
    held_out_share: float = 0.0,
    skip_unreadable: bool = False,
    values: Mapping[str, RowArray] | None = None,
  ):
    if not files:
      raise UserError('there are no examples to train on: TRAIN_FILES=/path/to/a.jsonl names some')
    files = expanded(files)
    self.seq_len = seq_len
    self.tokenizer = open_tokenizer(vocab_path)
    check_vocabulary(self.tokenizer, vocab_size)
    self.too_long: TooLong = too_long
    self._encoding = ChatEncoding(
      self.tokenizer, vocab_size, start_id, eos_ids, chat_template, date, thinking
    )
    self._warnings = ExampleWarnings()
    self._has_pairs = self.has_chats = False
    self.files, self.name = files, ', '.join(files)
    self.num_skipped = 0
    self.long, self.refused = LongRecords(), RefusedRecords()
    self.formats: collections.Counter[str] = collections.Counter()
    self._examples: list[SftExample] = []
    for place, examples in self._read_all(files):
      self._add(examples, place, too_long)
    self.refused.check(self.name, skip_unreadable and bool(self._examples or self.long.count))
    if too_long == 'error':
      self._check_lengths()
    self.holds_out = split != 'all'
    share_said = self._keep(split, held_out_share) if self._examples and self.holds_out else []
    if not self._examples:
      long = f'; the longest are {self.long.longest}' if self.long.count else ''
      raise UserError(
        f'{self.name} holds no {self.noun} of at most {self.longest} tokens{long}: raise '
        'MAX_SEQ_LEN'
      )
    self.num_cut = sum(e.is_cut for e in self._examples)
    if self.num_skipped or self.num_cut:
      log.warning('%s: %s', self.name, self._too_long())
    self.warnings = self._warnings.lines(self._has_pairs and not self._encoding.end_ids)
    self.warnings += share_said
    if self._encoding.unknown:
      self.warnings.append(self._encoding.unknown)
    self.thinking = self._warnings.thinking
    self.max_token_id = max(int(e.ids.max()) for e in self._examples)
    self.fingerprint = zlib.crc32(np.array([e.identity for e in self._examples]).tobytes())
    self.tokens_fingerprint = 0
    for example in self._examples:
      for part in (example.ids, example.is_answer):
        self.tokens_fingerprint = zlib.crc32(part.tobytes(), self.tokens_fingerprint)
    lengths = np.array([len(e.ids) - 1 for e in self._examples])
    self.lengths = lengths.reshape(-1, self.examples_of_a_record).sum(1)
    self.num_learned = sum(int(e.is_answer[1:].sum()) for e in self._examples)
    per_record, of_records = self.examples_of_a_record, self.lengths.tolist()
    rows = pack(of_records, seq_len) if packed else [[i] for i in range(len(of_records))]
    self._rows = [[per_record * i + k for i in row for k in range(per_record)] for row in rows]
    self.rows_fingerprint = zlib.crc32(repr((seq_len, self._rows)).encode())
    self.row_values = {
      name: _unknown(dtype, (len(rows), seq_len, *dims))
      for name, (dtype, dims) in (values or {}).items()
    }

  def __len__(self) -> int:
    return len(self._rows)

  @property
  def num_examples(self) -> int:
    return len(self._examples)

  @property
  def num_records(self) -> int:
    return len(self._examples) // self.examples_of_a_record

  @property
  def longest(self) -> int:
    """The most tokens that a record may have."""
    return self.seq_len + 1

  def example(self, number: int) -> SftExample:
    return self._examples[number]

  def read(self, indices: np.ndarray) -> Batch:
    """Returns rows `indices` [b]: ids, labels, weights, segment_ids and segment_pos [b, T]."""
    shape = (len(indices), self.seq_len)
    batch = {k: np.zeros(shape, np.int32) for k in ('ids', 'labels', 'segment_ids', 'segment_pos')}
    weights = np.zeros(shape, np.float32)
    for r, index in enumerate(indices):
      start = 0
      for segment, number in enumerate(self._rows[index], 1):
        example = self._examples[number]
        end = start + len(example.ids) - 1
        if number in self.left_out:  # its place stays, as padding
          start = end
          continue
        batch['ids'][r, start:end] = example.ids[:-1]
        batch['labels'][r, start:end] = example.ids[1:]
        batch['segment_ids'][r, start:end] = segment
        batch['segment_pos'][r, start:end] = np.arange(end - start)
        weights[r, start:end] = example.is_answer[1:]
        start = end
    return batch | {'weights': weights} | {k: v[indices] for k, v in self.row_values.items()}

  def origins(self, indices: np.ndarray) -> np.ndarray:
    """Returns (example, token) of each target of rows `indices`, int64 [b, T, 2]; −1: padding.

    Token 0 of an example is no target, as nothing precedes it.
    """
    found = np.full((len(indices), self.seq_len, 2), -1, np.int64)
    for r, index in enumerate(indices):
      start = 0
      for number in self._rows[index]:
        tokens = np.arange(1, len(self._examples[number].ids))
        end = start + len(tokens)
        if number in self.left_out:
          start = end
          continue
        found[r, start:end] = np.stack([np.full(len(tokens), number), tokens], axis=1)
        start = end
    return found

  def leave_out(self, places: Sequence[Place]) -> list[Place]:
    """Makes padding of the examples that are among `places`; returns those that are."""
    wanted = {(canonical(p.source), p.record): p for p in places}
    sources = {
      source: canonical(source) for source in {Place.of(e.place).source for e in self._examples}
    }
    found: dict[Place, None] = {}
    for number, example in enumerate(self._examples):
      place = Place.of(example.place)
      key = sources[place.source], place.record
      if key in wanted:
        self.left_out |= {number}
        found[wanted[key]] = None
    return list(found)

  def place_of(self, document: int) -> Place:
    return Place.of(self._examples[document].place)

  def length_of(self, document: int) -> int:
    return len(self._examples[document].ids) - 1

  def _read_all(self, files: Sequence[str]) -> Iterator[tuple[str, list[SftExample]]]:
    """Yields the place of each record and its examples."""
    for place, raw in self._raws(files):
      found = self.refused.attempt(self._read, place, raw)
      if found:
        yield place, found

  @staticmethod
  def _raws(files: Sequence[str]) -> Iterator[tuple[str, Raw]]:
    return itertools.chain.from_iterable(map(raw_records, files))

  def _read(self, place: str, raw: Raw) -> list[SftExample]:
    """Returns the examples of a record, of which there are examples_of_a_record."""
    contents = self._contents(place, parsed(raw, place))
    return [self._example(place, each) for each in contents]

  def _contents(self, place: str, record: Record) -> list[Pair | Conversation]:
    """Returns the examples of a record, not yet encoded, and notes what it has besides."""
    fields = Fields(record)
    with located(place):
      if self.examples_of_a_record == 1 and fields.one_of(*LABELS) is not None:
        self._warnings.labelled.append(place)
      found = self.contents_of(fields)
      self._warnings.note_unread(check_unread(fields, found))
    self.formats[self._format(fields)] += 1
    return found

  @classmethod
  def odd_in(cls, record: Fields) -> Iterator[tuple[str, str]]:
    """Yields the kinds of what is odd in a record, with details; none if a run refuses it."""
    try:
      examples = cls.contents_of(record)
      check_unread(record, examples)
    except UserError:
      return
    yield from sft_warnings.odd_in(examples)

  @staticmethod
  def contents_of(record: Fields) -> list[Pair | Conversation]:
    """Returns the examples of a record, not yet encoded; UserError if it is in no known format."""
    return [format_of(record).read(record)]

  @staticmethod
  def _format(record: Fields) -> str:
    return ' and '.join(format_of(record).keys)

  def _add(self, examples: list[SftExample], place: str, too_long: TooLong) -> None:
    (example,) = examples
    length, most = len(example.ids), self.seq_len + 1
    if length > most:
      self.long.add(length, place, f'{place} has {length:,} tokens and a row holds {most:,}')
      if too_long != 'truncate' or not example.is_answer[1:most].any():
        self.num_skipped += 1
        return
      ids, is_answer = example.ids[:most], example.is_answer[:most]
      example = dataclasses.replace(example, ids=ids, is_answer=is_answer, is_cut=True)
    self._examples.append(example)

  def _check_lengths(self) -> None:
    """Raises UserError if examples are too long."""
    if not self.long.count:
      return
    others = ''
    if self.long.count > 1:
      others = f'; {self.long.count:,} {self.noun}s are too long, the longest {self.long.longest}'
    raise UserError(f'{self.long.first}{others}: raise MAX_SEQ_LEN, or {self._ways_out}')

  def _too_long(self) -> str:
    """Says what became of the records that are too long."""
    most = f'of more than {self.longest:,} tokens'
    are = lambda n: 'is' if n == 1 else 'are'
    left_out = f'{are(self.num_skipped)} left out'
    if not self.num_cut:
      found = f'{amount(self.num_skipped, self.noun)} {most} {left_out}'
    else:
      found = f'{amount(self.num_cut, self.noun)} {most} {are(self.num_cut)} cut'
      if self.num_skipped:
        found += f', and {self.num_skipped:,} {left_out}, as the answer begins behind the cut'
    return f'{found}, {self.num_records:,} {"stays" if self.num_records == 1 else "stay"}'

  def _keep(self, split: Split, share: float) -> list[str]:
    """Keeps the examples of a split; returns a line if the share is another one than was asked for.

    Raises:
      UserError: There is none.
    """
    of_records = self._examples[:: self.examples_of_a_record]
    apart = held_out([e.identity for e in of_records], share)
    here = apart == (split == 'held_out')
    if here.all() or not here.any():
      raise UserError(
        f'{self.name}: {len(here):,} {self.noun}s are too few, or too similar, to hold out '
        f'{share:.1%} of them: EVAL_FILES=/path/to/b.jsonl names others'
      )
    here = here.repeat(self.examples_of_a_record)
    self._examples = [e for e, is_here in zip(self._examples, here, strict=True) if is_here]
    count, total = int(apart.sum()), len(apart)
    if abs(count / total - share) <= share / 4:
      return []
    return [
      f'{count:,} of {total:,} {self.noun}s are held out, {count / total:.1%} instead of '
      f'{share:.1%} (EVAL_FRACTION), because hashes of their contents choose them'
    ]

  def _example(self, place: str, contents: Pair | Conversation) -> SftExample:
    encoded = self._encoded(place, contents)
    self._warnings.add(place, encoded)
    return SftExample(encoded.ids, encoded.is_learned, identity(contents), place=place)

  def _encoded(self, place: str, contents: Pair | Conversation) -> Encoded:
    if isinstance(contents, Conversation):
      self._encoding.check_template(place)
    with located(place):
      if isinstance(contents, Pair):
        self._has_pairs = True
        encoded = self._encoding.pair(*contents)
      else:
        self.has_chats = True
        encoded = self._chat(contents)
    empty = isinstance(contents, Pair) and not contents.targets  # its EOS would be learned
    if empty or not encoded.is_learned[1:].any():
      raise UserError(f'{place} has no answer to learn')
    return encoded

  def _chat(self, chat: Conversation) -> Encoded:
    encoded = self._encoding.chat(chat)
    ends = encoded.ids[encoded.is_learned]
    if len(ends) and not np.isin(ends, self._encoding.chat_eos_ids).any():
      self._warnings.endless += 1
    return encoded


def _unknown(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
  """Returns an array of values that no one can take for others."""
  value = np.nan if np.issubdtype(np.dtype(dtype), np.floating) else -1
  return np.broadcast_to(np.array(value, dtype), shape)


class AnswerRows(SftRows):
  """SftRows in which each answer of a conversation is an example, with what precedes it as prompt.

  Each prompt is what the chat template writes when this answer is asked for. Templates that write
  earlier turns in another way, as those that drop their thinking, so show the model in training
  what it sees later. A conversation is repeated for each of its answers.
  """

  noun = 'answer'

  def _read_all(self, files: Sequence[str]) -> Iterator[tuple[str, list[SftExample]]]:
    for place, raw in self._raws(files):
      for example in self.refused.attempt(self._read, place, raw) or []:
        yield place, [example]

  def _read(self, place: str, raw: Raw) -> list[SftExample]:
    """Returns an example for each answer; those of a conversation are held out together."""
    (whole,) = self._contents(place, parsed(raw, place))
    of_answers = [self._example(place, part) for part in answers_of(whole)]
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


def pack(lengths: Sequence[int], seq_len: int) -> list[list[int]]:
  """Packs examples into rows of at most `seq_len`; returns the example numbers of each row.

  Each example, in order, goes into the first open row with room for it. A row is closed once 64
  younger rows are open, so that the work is linear.
  """
  rows: list[list[int]] = []
  open_rows: list[tuple[int, int]] = []  # (row, remaining room)
  for number, length in enumerate(lengths):
    for k, (row, room) in enumerate(open_rows):
      if length <= room:
        rows[row].append(number)
        open_rows[k] = (row, room - length)
        break
    else:
      rows.append([number])
      open_rows = [*open_rows[-63:], (len(rows) - 1, seq_len - length)]
  return rows
