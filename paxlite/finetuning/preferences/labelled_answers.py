"""Answers that are labelled as good or bad, each beside an answer to another prompt, for KTO.

    {"prompt": "2 + 2 =", "completion": " 4", "label": true}

The loss compares an answer with how much likelier the model has made answers that do not belong to
their prompts. So each answer has beside it its own prompt with the answer of another record. That
is the nearest one before it, in the order of the files, which has another prompt and fits.
"""

import dataclasses
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from paxlite.chats.conversations import Conversation, Message
from paxlite.chats.sft_formats import LABELS, Pair, check_unread, format_of, identity
from paxlite.core.errors import UserError, located
from paxlite.core.fields import Fields
from paxlite.data.record_files import Raw
from paxlite.data.records import parsed
from paxlite.finetuning.chats.sft import SftExample
from paxlite.finetuning.preferences.preference_rows import KEYS, PreferenceRows

# as JSON and as tables have them
_LABELS = {'true': True, '1': True, '1.0': True, 'false': False, '0': False, '0.0': False}
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
  _together = 'the answer, and beside it that of another record, with their prompts'

  def __init__(self, files: Sequence[str], *args: object, **kwargs: object):
    super().__init__(files, *args, **kwargs)  # type: ignore[arg-type]
    signs = np.array([e.preference for e in self._examples[::2]], np.int32)
    self.tokens_fingerprint = zlib.crc32(signs.tobytes(), self.tokens_fingerprint)
    self.fingerprint = zlib.crc32(self._said.to_bytes(4, 'little'), self.fingerprint)
    good, bad = int((signs > 0).sum()), int((signs < 0).sum())
    if not good or not bad or max(good, bad) > 2 * min(good, bad):
      self.warnings.append(
        f'Of {good + bad:,} labelled answers {good:,} are good: choose DESIRABLE_WEIGHT and '
        'UNDESIRABLE_WEIGHT so that weight times number is about the same for both kinds'
      )

  @staticmethod
  def contents_of(record: Fields) -> list[Pair | Conversation]:
    return [answer.contents for answer in labelled(record)]

  @staticmethod
  def _format(record: Fields) -> str:
    if all(key in record for key in KEYS):
      return ' and '.join(KEYS)
    return ' and '.join((*format_of(record).keys, next(key for key in LABELS if key in record)))

  def _read_all(self, files: Sequence[str]) -> Iterator[tuple[str, list[SftExample]]]:
    found: list[tuple[Labelled, SftExample]] = []
    self._said = 0  # a checksum of all answers and labels
    for place, raw in self._raws(files):
      answers = self.refused.attempt(self._answers, place, raw) or []
      found += answers
      for answer, _ in answers:
        said = identity(answer.contents), answer.is_good
        self._said = zlib.crc32(repr(said).encode(), self._said)
    for kind in (Pair, Conversation):
      yield from self._with_others([each for each in found if isinstance(each[0].contents, kind)])

  def _answers(self, place: str, raw: Raw) -> list[tuple[Labelled, SftExample]]:
    """Returns the labelled answers of a record, and their examples."""
    fields = Fields(parsed(raw, place))
    with located(place):
      answers = labelled(fields)
      self._warnings.note_unread(check_unread(fields, [each.contents for each in answers]))
    found = [(answer, self._example(place, answer.contents)) for answer in answers]
    self.formats[self._format(fields)] += 1
    return found

  def _with_others(
    self, answers: Sequence[tuple[Labelled, SftExample]]
  ) -> Iterator[tuple[str, list[SftExample]]]:
    """Yields the place of each answer, its example, and that of its prompt with another answer."""
    prompts = [answer.prompt for answer, _ in answers]
    own = [example for _, example in answers]
    learned = [int(e.is_answer.sum()) for e in own]

    def fits(i: int, other: int) -> bool:
      both = 2 * (len(own[i].ids) - 1) - learned[i] + learned[other]  # but for merged tokens
      return both <= self.seq_len

    for i, (answer, example) in enumerate(answers):
      place, number = example.place, nearest_other(prompts, i, fits)
      if number is None:
        form = 'a text' if isinstance(answer.contents, Pair) else 'messages'
        raise UserError(
          f'{place}: no other record has another prompt that is {form}, too, and KTO compares an '
          'answer with answers to other prompts: add records'
        )
      sign = 1 if answer.is_good else -1
      contents = answer.with_answer(answers[number][0])
      mixed = self._encoded(f'{place}, with the answer of {own[number].place}', contents)
      yield (
        place,
        [  # the answers to one prompt are held out together
          dataclasses.replace(example, preference=sign, identity=prompts[i]),
          SftExample(mixed.ids, mixed.is_learned, prompts[i], preference=2 * sign, place=place),
        ],
      )


def labelled(record: Fields) -> list[Labelled]:
  """Returns the labelled answers of a record: one, or those of a pair.

  Raises:
    UserError: It has no label, or one that is neither true nor false, or is in no known format.
  """
  if all(key in record for key in KEYS):
    chosen, rejected = PreferenceRows.contents_of(record)
    return [Labelled(chosen, True), Labelled(rejected, False)]
  contents, label = format_of(record).read(record), record.one_of(*LABELS)
  if label is None:
    raise UserError(
      'a labelled answer has "prompt", "completion" and "label", which is true or false, and this '
      'record has no label'
    )
  is_good = _LABELS.get(str(label).strip().lower())
  if is_good is None:
    raise UserError(f'"label" is {label!r}, and must be true for a good or false for a bad answer')
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
