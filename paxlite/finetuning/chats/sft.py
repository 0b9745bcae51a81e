"""Supervised fine-tuning: packed prompts and answers, with the loss on the answers."""

import logging
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import numpy as np

from paxlite.chats.conversations import Conversation
from paxlite.chats.sft_formats import Pair, check_unread
from paxlite.core.errors import UserError
from paxlite.core.fields import Fields
from paxlite.core.json_text import JsonObject
from paxlite.core.wording import amount
from paxlite.data.base import Batch, RowArray
from paxlite.data.document_encoding import unknown_tokens
from paxlite.data.example_rows import ExampleRows
from paxlite.data.held_out import held_out
from paxlite.data.places import Place
from paxlite.data.records import canonical
from paxlite.data.refused_records import MOST_NAMED, LongRecords
from paxlite.data.tokenizer import check_vocabulary, open_tokenizer
from paxlite.files.text_files import expanded
from paxlite.finetuning.chats import sft_warnings
from paxlite.finetuning.chats.encoded_examples import EncodedExamples, SftExample
from paxlite.finetuning.chats.example_files import read_examples
from paxlite.finetuning.chats.example_reader import AnswerReader, ReaderOptions, SftReader
from paxlite.finetuning.example_cache import ArrayWriter, ExampleCache, in_memory

log = logging.getLogger('paxlite')

TooLong = Literal['error', 'skip', 'truncate']
Split = Literal['all', 'train', 'held_out']


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
    cache: Where the examples of many records are kept: see ExampleCache.

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

  reader: type[SftReader] = SftReader
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
    cache: str = '',
  ):
    if not files:
      raise UserError('no examples to train on: set TRAIN_FILES=/path/to/a.jsonl')
    files = expanded(files)
    self.seq_len = seq_len
    self.tokenizer = open_tokenizer(vocab_path)
    check_vocabulary(self.tokenizer, vocab_size)
    self.too_long: TooLong = too_long
    options = ReaderOptions(
      self.reader, vocab_path, vocab_size, start_id, eos_ids, chat_template, date, thinking
    )
    self.files, self.name = files, ', '.join(files)
    self._cache = ExampleCache(cache)
    self._examples = self._encoded(options)
    notes = self._examples.notes
    self.refused, self.formats, self.has_chats = notes.refused, notes.formats, notes.has_chats
    self.long, self.num_skipped = LongRecords(), 0
    here = self._fitting()
    says = split != 'held_out'  # the training data are the other part of the same records
    self.refused.check(self.name, skip_unreadable and bool(len(here) or self.long.count), says)
    if too_long == 'error':
      self._check_lengths()
    self.holds_out = split != 'all'
    if says and (left_out := self._too_long(here)):
      log.warning('%s: %s', self.name, left_out)
    share_said: list[str] = []
    if len(here) and self.holds_out:
      here, share_said = self._kept(here, split, held_out_share)
    if not len(here):
      long = f'; the longest are {self.long.longest}' if self.long.count else ''
      raise UserError(
        f'{self.name} holds no {self.noun} of at most {self._most}{long}: raise MAX_SEQ_LEN'
      )
    per_record = self.examples_of_a_record
    self._numbers = self._examples_of(here)
    whole = self._examples.length[self._numbers]
    self._lengths = np.minimum(whole, seq_len + 1)
    self.num_cut = int((whole > self._lengths).sum())
    end_ids = options.opened(self.tokenizer).encoding.end_ids
    self.warnings = notes.warnings.lines(notes.has_pairs and not end_ids)
    self.warnings += share_said
    if notes.num_unknown:
      self.warnings.append(unknown_tokens(notes.num_unknown, notes.num_tokens))
    self.thinking = notes.warnings.thinking
    self.fingerprint = zlib.crc32(self._examples.identity[self._numbers].tobytes())
    self.lengths = (self._lengths - 1).reshape(-1, per_record).sum(1)
    self._lay_out(packed)
    self.row_values = {
      name: _unknown(dtype, (len(self), seq_len, *dims))
      for name, (dtype, dims) in (values or {}).items()
    }

  def _encoded(self, options: ReaderOptions) -> EncodedExamples:
    """Returns the examples of all records, whatever their lengths."""
    return read_examples(self.files, options, options.opened(self.tokenizer), self._cache)

  def _lay_out(self, packed: bool) -> None:
    """Puts examples into rows, and sets what looks at all of their tokens."""
    of = self._examples.key
    key: JsonObject | None = of and {
      'rows_of': of,
      'numbers': zlib.crc32(self._numbers.tobytes()),
      'seq_len': self.seq_len,
      'packed': packed,
    }
    make = lambda writer: self._write_rows(writer, packed)
    found = self._cache.get(key, make) if key else in_memory(make)
    self._row_ends, self._in_rows = found.arrays['row_ends'], found.arrays['examples']
    facts = found.facts
    self.max_token_id, self.num_learned = facts['max_token_id'], facts['num_learned']
    self.tokens_fingerprint, self.rows_fingerprint = facts['tokens'], facts['rows']

  def _write_rows(self, writer: ArrayWriter, packed: bool) -> JsonObject:
    per_record, of_records = self.examples_of_a_record, self.lengths.tolist()
    rows = pack(of_records, self.seq_len) if packed else [[i] for i in range(len(of_records))]
    rows = [[per_record * i + k for i in row for k in range(per_record)] for row in rows]
    ends = np.cumsum([len(row) for row in rows])
    writer.append({'row_ends': ends, 'examples': np.array([i for row in rows for i in row])})
    crc = num_learned = largest = 0
    for number in range(self.num_examples):
      example = self.example(number)
      crc = zlib.crc32(example.is_answer.tobytes(), zlib.crc32(example.ids.tobytes(), crc))
      num_learned += int(example.is_answer[1:].sum())
      largest = max(largest, int(example.ids.max()))
    rows_crc = zlib.crc32(repr((self.seq_len, rows)).encode())
    return {'max_token_id': largest, 'num_learned': num_learned, 'tokens': crc, 'rows': rows_crc}

  def __len__(self) -> int:
    return len(self._row_ends)

  @property
  def num_examples(self) -> int:
    return len(self._numbers)

  @property
  def num_records(self) -> int:
    return len(self._numbers) // self.examples_of_a_record

  @property
  def longest(self) -> int:
    """The most tokens that a record may have."""
    return self.seq_len + 1

  def example(self, number: int) -> SftExample:
    return self._examples.example(int(self._numbers[number]), self.seq_len + 1)

  def _row(self, index: int) -> list[int]:
    """Returns the numbers of the examples in a row."""
    start = int(self._row_ends[index - 1]) if index else 0
    numbers: list[int] = self._in_rows[start : self._row_ends[index]].tolist()
    return numbers

  def read(self, indices: np.ndarray) -> Batch:
    """Returns rows `indices` [b]: ids, labels, weights, segment_ids and segment_pos [b, T]."""
    shape = (len(indices), self.seq_len)
    batch = {k: np.zeros(shape, np.int32) for k in ('ids', 'labels', 'segment_ids', 'segment_pos')}
    weights = np.zeros(shape, np.float32)
    for r, index in enumerate(indices):
      start = 0
      for segment, number in enumerate(self._row(int(index)), 1):
        end = start + self.length_of(number)
        if number in self.left_out:  # its place stays, as padding
          start = end
          continue
        example = self.example(number)
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
      for number in self._row(int(index)):
        tokens = np.arange(1, self.length_of(number) + 1)
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
    sources = [canonical(source) for source in self._examples.sources]
    records = {-1 if p.record is None else p.record for p in places}
    may_be = np.isin(self._examples.record[self._numbers], list(records))
    found: dict[Place, None] = {}
    for number in np.flatnonzero(may_be).tolist():
      of_all = self._numbers[number]
      key = sources[self._examples.source[of_all]], self._examples.place(of_all).record
      if key in wanted:
        self.left_out |= {number}
        found[wanted[key]] = None
    return list(found)

  def place_of(self, document: int) -> Place:
    return self._examples.place(self._numbers[document])

  def length_of(self, document: int) -> int:
    return int(self._lengths[document]) - 1

  @classmethod
  def odd_in(cls, record: Fields) -> Iterator[tuple[str, str]]:
    """Yields the kinds of what is odd in a record, with details; none if a run refuses it."""
    try:
      examples = cls.contents_of(record)
      check_unread(record, examples)
    except UserError:
      return
    yield from sft_warnings.odd_in(examples)

  @classmethod
  def contents_of(cls, record: Fields) -> list[Pair | Conversation]:
    """Returns the examples of a record, not yet encoded; UserError if it is in no known format."""
    return cls.reader.contents_of(record)

  def _fitting(self) -> np.ndarray:
    """Returns the numbers of the records that fit, or can be cut, and counts the long ones."""
    examples, per_record = self._examples, self.examples_of_a_record
    lengths = (examples.length - 1).reshape(-1, per_record).sum(1)
    is_long = lengths > self.seq_len
    long = np.flatnonzero(is_long)
    if len(long):
      shown = lengths[long] >= np.sort(lengths[long])[-MOST_NAMED:][0]  # the others are not named
      shown[0] = True
      for number in long[shown].tolist():
        # where a record is one example, its first token counts, too
        length = int(lengths[number]) + self.longest - self.seq_len
        place = str(examples.place(number * per_record))
        self.long.add(length, place, self._long(place, length))
      self.long.count = len(long)
    if self.too_long == 'truncate' and per_record == 1:
      is_long &= examples.first_learned > self.seq_len
    self.num_skipped = int(is_long.sum())
    return np.flatnonzero(~is_long)

  def _long(self, place: str, length: int) -> str:
    return f'{place} has {length:,} tokens; a sequence holds {self._most}'

  def _check_lengths(self) -> None:
    """Raises UserError if examples are too long."""
    if not self.long.count:
      return
    others = ''
    if self.long.count > 1:
      others = f'; {self.long.count:,} {self.noun}s are too long, the longest {self.long.longest}'
    raise UserError(f'{self.long.first}{others}: raise MAX_SEQ_LEN, or {self._ways_out}')

  def _too_long(self, here: np.ndarray) -> str:
    """Describes what happened to records of all splits that are too long; '' for none."""
    num_cut = int((self._examples.length[self._examples_of(here)] > self.seq_len + 1).sum())
    most = f'of more than {self._most}'
    are = lambda n: 'is' if n == 1 else 'are'
    left_out = f'{are(self.num_skipped)} left out'
    if num_cut:
      found = f'{amount(num_cut, self.noun)} {most} {are(num_cut)} cut'
      if self.num_skipped:
        found += f', and {self.num_skipped:,} {left_out}, as the answer begins behind the cut'
    elif self.num_skipped:
      found = f'{amount(self.num_skipped, self.noun)} {most} {left_out}'
    else:
      return ''
    return f'{found}, {len(here):,} {"stays" if len(here) == 1 else "stay"}'

  @property
  def _most(self) -> str:
    """The most tokens of a record, for messages."""
    with_first = 'MAX_SEQ_LEN + 1 = ' if self.longest > self.seq_len else ''
    return f'{with_first}{self.longest:,} tokens'

  def _examples_of(self, records: np.ndarray) -> np.ndarray:
    per_record = self.examples_of_a_record
    return (records[:, None] * per_record + np.arange(per_record)).reshape(-1)

  def _kept(self, here: np.ndarray, split: Split, share: float) -> tuple[np.ndarray, list[str]]:
    """Returns the records of a split, and a line if the share differs from the requested one.

    Raises:
      UserError: There is none.
    """
    apart = held_out(self._examples.identity[here * self.examples_of_a_record], share)
    is_kept = apart == (split == 'held_out')
    if is_kept.all() or not is_kept.any():
      raise UserError(
        f'{self.name}: {len(here):,} {self.noun}s are too few, or too similar, to hold out '
        f'{share:.1%} of them: EVAL_FILES=/path/to/b.jsonl names others'
      )
    count, total = int(apart.sum()), len(apart)
    if abs(count / total - share) <= share / 4:
      return here[is_kept], []
    return here[is_kept], [
      f'{count:,} of {total:,} {self.noun}s are held out, {count / total:.1%} instead of '
      f'{share:.1%} (EVAL_FRACTION), because hashes of their contents choose them'
    ]


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
  reader = AnswerReader


def pack(lengths: Sequence[int], seq_len: int, most: int = 0) -> list[list[int]]:
  """Packs examples into rows of at most `seq_len`; returns the example numbers of each row.

  Each example, in order, goes into the first open row with room for it. A row is closed once 64
  younger rows are open, so that the work is linear, and once it has `most` examples, from 1 on.
  """
  rows: list[list[int]] = []
  open_rows: list[tuple[int, int]] = []  # (row, remaining room)
  for number, length in enumerate(lengths):
    for k, (row, room) in enumerate(open_rows):
      if length <= room:
        rows[row].append(number)
        open_rows[k] = (row, 0 if len(rows[row]) == most else room - length)
        break
    else:
      rows.append([number])
      open_rows = [*open_rows[-63:], (len(rows) - 1, 0 if most == 1 else seq_len - length)]
  return rows
