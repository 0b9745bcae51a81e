"""Answers labelled good or bad, each with an answer to another prompt, for KTO.

    {"prompt": "2 + 2 =", "completion": " 4", "label": true}

The loss compares an answer with how much likelier the model has made answers that do not belong to
their prompts. So each answer has beside it its own prompt with the answer of another record. That
is the nearest one before it, in the order of the files, which has another prompt and fits.
"""

import dataclasses
import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from paxlite.chats.conversations import Conversation, Message
from paxlite.chats.sft_formats import LABELS, Pair, check_unread, format_of, identity
from paxlite.core.errors import UserError, located
from paxlite.core.fields import Fields
from paxlite.core.json_text import JsonObject
from paxlite.data.record_files import Raw
from paxlite.data.records import parsed
from paxlite.finetuning.chats.encoded_examples import (
  LAZY,
  EncodedBlock,
  EncodedExamples,
  Notes,
  SftExample,
  block_of,
  write_blocks,
)
from paxlite.finetuning.chats.example_files import encode_blocks
from paxlite.finetuning.chats.example_reader import KeepingReader, ReaderOptions, SftReader
from paxlite.finetuning.example_cache import ArrayWriter, in_memory
from paxlite.finetuning.preferences.preference_rows import KEYS, PreferenceReader, PreferenceRows

# as JSON and as tables have them
_LABELS = {'true': True, '1': True, '1.0': True, 'false': False, '0': False, '0.0': False}
_BLOCK = 256  # answers that a worker is given at once
_TRIED = 64  # earlier records, among which one is looked for whose answer fits into the row


class Labelled(NamedTuple):
  """An answer with its prompt, and whether it is good."""

  contents: Pair | Conversation
  is_good: bool

  @property
  def prompt(self) -> int:
    """A checksum of the prompt; prompts as text and as messages differ."""
    return identity(self._joined(None))

  def with_answer(self, other: 'Labelled') -> Pair | Conversation:
    """Returns this prompt with the answer of another one of the same kind."""
    return self._joined(other)

  def _joined(self, other: 'Labelled | None') -> Pair | Conversation:
    own, theirs = self.contents, other.contents if other else None
    if isinstance(own, Pair):
      return Pair(own.inputs, theirs.targets if isinstance(theirs, Pair) else '')
    start, masked = own.first_learned, {i for i in own.masked if i < own.first_learned}
    answer: Sequence[Message] = []
    if isinstance(theirs, Conversation):
      first = theirs.first_learned
      answer = theirs.messages[first:]
      masked |= {i - first + start for i in theirs.masked if i >= first}
    messages = [*own.messages[:start], *answer]
    return dataclasses.replace(own, messages=messages, masked=frozenset(masked))


class LabelledReader(KeepingReader, PreferenceReader):
  """Reads a record as its labelled answers, and keeps it: another one takes an answer from it."""

  examples_of_a_record = 1

  def block(self, records: Iterable[tuple[str, Raw]]) -> EncodedBlock:
    self._answers: list[tuple[int, bool, int]] = []  # prompt, whether it is a text, number
    found = super().block(records)
    columns = np.array(self._answers, np.int64).reshape(-1, 3).T
    more = dict(zip(('prompt', 'is_text', 'answer'), columns, strict=True))
    return dataclasses.replace(found, arrays=found.arrays | more)

  def read(self, place: str, raw: Raw) -> list[SftExample]:
    record = parsed(raw, place)
    fields = Fields(record)
    with located(place):
      answers = labelled(fields)
      unread = check_unread(fields, [each.contents for each in answers])
      self.notes.warnings.note_unread(unread)
    found = [self._own(place, answer) for answer in answers]
    self.notes.formats[self.format_of(fields)] += 1
    for number, each in enumerate(answers):
      self.keep(record)
      self._answers.append((each.prompt, isinstance(each.contents, Pair), number))
    return found

  def _own(self, place: str, answer: Labelled) -> SftExample:
    example = self.example(place, answer.contents)
    return dataclasses.replace(example, preference=1 if answer.is_good else -1)

  @staticmethod
  def contents_of(record: Fields) -> list[Pair | Conversation]:
    return [answer.contents for answer in labelled(record)]

  @staticmethod
  def format_of(record: Fields) -> str:
    if all(key in record for key in KEYS):
      return ' and '.join(KEYS)
    return ' and '.join((*format_of(record).keys, next(key for key in LABELS if key in record)))


class KeptAnswer(NamedTuple):
  """A labelled answer: its place, its record, and its number in that."""

  place: str
  record: bytes
  number: int

  def read(self) -> Labelled:
    return labelled(Fields(parsed(self.record, self.place)))[self.number]


Beside = tuple[SftExample, KeptAnswer, KeptAnswer]  # an example, its answer, and another record's


class LabelledRows(PreferenceRows):
  """A RowSource of labelled answers.

  An answer and its prompt are segment 2i − 1 of a row, with 1 or −1 in `preferences`; the same
  prompt with the answer of another record is segment 2i, with 2 or −2. A record with a chosen and a
  rejected answer is two labelled ones. The arguments and attributes are those of SftRows.

  Raises:
    UserError: A record has no label, or another form, or no record has another prompt, or an answer
      is too long for a row.
  """

  noun = 'labelled answer'
  reader = LabelledReader
  _together = "the answer and another record's answer, with their prompts"

  def __init__(self, files: Sequence[str], *args: object, **kwargs: object):
    super().__init__(files, *args, **kwargs)  # type: ignore[arg-type]
    signs = self._examples.preference[self._numbers[::2]].astype(np.int32)
    self.tokens_fingerprint = zlib.crc32(signs.tobytes(), self.tokens_fingerprint)
    self.fingerprint = zlib.crc32(self._said.to_bytes(4, 'little'), self.fingerprint)
    good, bad = int((signs > 0).sum()), int((signs < 0).sum())
    if not good or not bad or max(good, bad) > 2 * min(good, bad):
      self.warnings.append(
        f'Of {good + bad:,} labelled answers {good:,} are good: choose DESIRABLE_WEIGHT and '
        'UNDESIRABLE_WEIGHT so that weight × number is similar for both kinds'
      )

  def _encoded(self, options: ReaderOptions) -> EncodedExamples:
    own = super()._encoded(options)
    self._said = 0  # a checksum of all answers and labels
    for said in zip(own.identity.tolist(), (own.preference > 0).tolist(), strict=True):
      self._said = zlib.crc32(repr(said).encode(), self._said)

    def make(writer: ArrayWriter) -> JsonObject:
      blocks = itertools.batched(self._beside(own), _BLOCK)
      encoded: Iterable[EncodedBlock]
      if own.key is None:
        reader = options.opened(self.tokenizer)
        encoded = (with_others(reader, block) for block in blocks)
      else:
        encoded = encode_blocks(blocks, options, lambda: None, with_others)
      empty = block_of([], Notes())
      return write_blocks(writer, itertools.chain([empty], encoded), own.notes)

    if own.key is None:
      return EncodedExamples(in_memory(make))
    key = {'with_others': own.key, 'seq_len': self.seq_len}
    return EncodedExamples(self._cache.get(key, make, LAZY), key)

  def _beside(self, own: EncodedExamples) -> Iterator[Beside]:
    """Yields each answer, and the one that stands beside it; those to texts come first."""
    is_text, prompts_of_all = own.more['is_text'] > 0, own.more['prompt']
    of_example = own.num_learned.tolist()  # the first token is none of an answer
    length = (own.length - 1).tolist()

    def answer(number: int) -> KeptAnswer:
      record, of_record = own.kept_record(number), int(own.more['answer'][number])
      return KeptAnswer(str(own.place(number)), record, of_record)

    for numbers in np.flatnonzero(is_text).tolist(), np.flatnonzero(~is_text).tolist():
      prompts = prompts_of_all[numbers].tolist()

      def fits(i: int, other: int, numbers: list[int] = numbers) -> bool:
        a, b = numbers[i], numbers[other]
        return 2 * length[a] - of_example[a] + of_example[b] <= self.seq_len  # roughly

      for i, number in enumerate(numbers):
        other = nearest_other(prompts, i, fits)
        if other is None:
          form = 'a text' if is_text[number] else 'messages'
          raise UserError(
            f'{own.place(number)}: KTO compares an answer with answers to other prompts, but no '
            f'other record has another prompt that is {form}: add records'
          )
        # the answers to one prompt are held out together
        example = own.example(number, int(own.length[number]))
        example = dataclasses.replace(example, identity=prompts[i])
        yield example, answer(number), answer(numbers[other])


def with_others(reader: SftReader, block: Sequence[Beside]) -> EncodedBlock:
  """Returns each example, and behind it that of its prompt with the answer of another record."""
  found = []
  with reader.noting():
    for example, own, other in block:
      contents = own.read().with_answer(other.read())
      mixed = reader.encoded(f'{own.place}, with the answer of {other.place}', contents)
      beside = dataclasses.replace(
        example, ids=mixed.ids, is_answer=mixed.is_learned, preference=2 * example.preference
      )
      found += [example, beside]
  return block_of(found, reader.notes)


def labelled(record: Fields) -> list[Labelled]:
  """Returns the labelled answers of a record: one, or those of a pair.

  Raises:
    UserError: It has no label, or one that is neither true nor false, or is in no known format.
  """
  if all(key in record for key in KEYS):
    chosen, rejected = PreferenceReader.contents_of(record)
    return [Labelled(chosen, True), Labelled(rejected, False)]
  contents, label = format_of(record).read(record), record.one_of(*LABELS)
  if label is None:
    raise UserError(
      'a labelled answer needs "prompt", "completion" and "label" (true or false), but this '
      'record has no label'
    )
  is_good = _LABELS.get(str(label).strip().lower())
  if is_good is None:
    raise UserError(f'"label" is {label!r}; it must be true for a good or false for a bad answer')
  if isinstance(contents, Conversation) and not contents.first_learned:
    contents = dataclasses.replace(contents, first_learned=_start_of_answer(contents))
  return [Labelled(contents, is_good)]


def _start_of_answer(chat: Conversation) -> int:
  """Returns the number of the first message after the last one of the user."""
  numbers = [i for i, message in enumerate(chat.messages) if message['role'] == 'user']
  start = numbers[-1] + 1 if numbers else 0
  if not 0 < start < len(chat.messages):
    raise UserError('a labelled conversation must end with an answer to a message of the user')
  return start


def nearest_other(
  keys: Sequence[int], number: int, fits: Callable[[int, int], bool] = lambda i, other: True
) -> int | None:
  """Returns the number of the nearest earlier key that differs, of those that fit if one does.

  Before 0 comes the last one. None: all keys are the same.
  """
  found, tried = None, 0
  for step in range(1, len(keys)):
    other = (number - step) % len(keys)
    if keys[other] == keys[number]:
      continue
    if fits(number, other):
      return other
    found = other if found is None else found
    tried += 1
    if tried == _TRIED:
      break
  return found
