"""Preferences: pairs of a chosen and a rejected answer to one prompt, packed into rows.

The array `preferences` [B, T] of a batch says what each token belongs to: 1 is a chosen answer, or
one that is labelled as good, and −1 a rejected or a bad one, both with their prompts. 2 and −2 are
answers to other prompts beside them: see labelled_answers.py. 0 is padding.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from paxlite.chats.conversations import Conversation, Message, list_of_messages, role_of
from paxlite.chats.sft_formats import LABELS, Pair, chat, identity, question_of, texts
from paxlite.core.errors import UserError
from paxlite.core.fields import Fields, is_empty
from paxlite.data.base import Batch
from paxlite.data.record_files import Raw
from paxlite.finetuning.chats.encoded_examples import SftExample
from paxlite.finetuning.chats.example_reader import SftReader
from paxlite.finetuning.chats.sft import SftRows

KEYS = 'chosen', 'rejected'
_SYSTEMS = 'system', 'developer'
_PROMPTS = 'prompt', 'question', 'query', 'instruction', 'messages', 'conversations'
_FORMS = (
  '"chosen" and "rejected" must be two answers to "prompt", as strings or as lists of messages, or '
  'two whole conversations or texts with one beginning'
)


class PreferenceReader(SftReader):
  """Reads a record as two examples: the chosen and the rejected answer, with their prompts."""

  examples_of_a_record = 2
  notes_labels = False

  def read(self, place: str, raw: Raw) -> list[SftExample]:
    chosen, rejected = super().read(place, raw)
    return [dataclasses.replace(chosen, preference=1), dataclasses.replace(rejected, preference=-1)]

  @staticmethod
  def contents_of(record: Fields) -> list[Pair | Conversation]:
    """Returns the chosen and the rejected answer; UserError if there is no difference."""
    for key in KEYS:
      if record.get(key) in ('', []):
        raise UserError(f'{key!r} is empty: no answer to learn from')
    answers = pair_of(record)
    if identity(answers[0]) == identity(answers[1]):
      raise UserError('"chosen" and "rejected" are the same: a pair must have a difference')
    return answers

  @staticmethod
  def format_of(record: Fields) -> str:
    return ' and '.join(key for key in (*_PROMPTS, *KEYS) if key in record)


class RewardReader(PreferenceReader):
  """Reads pairs for a reward model: see RewardRows."""

  def example(self, place: str, contents: Pair | Conversation) -> SftExample:
    example = super().example(place, contents)
    ids = np.append(example.ids, example.ids[-1:])  # a label that no loss reads
    is_last = np.arange(len(ids)) == len(ids) - 1
    return dataclasses.replace(example, ids=ids, is_answer=is_last)


class PreferenceRows(SftRows):
  """A RowSource of pairs; both answers of a pair are in one row, as segments 2i − 1 and 2i.

  The chosen answer comes first. What the model is asked for are the answers: weights are 1 there.
  The arguments and attributes are those of SftRows, of which a record has two examples.

  Raises:
    UserError: A record has another form, both answers are the same, or it is too long for a row.
  """

  examples_of_a_record = 2
  noun = 'pair'
  reader = PreferenceReader
  _ways_out = 'TOO_LONG=skip'
  _together = 'both answers with their prompts'  # what a row has to hold

  @property
  def longest(self) -> int:
    return self.seq_len  # of both answers, without the first token of each

  def read(self, indices: np.ndarray) -> Batch:
    """Returns rows with preferences [b, T] too, int32."""
    batch = super().read(indices)
    preferences = np.zeros_like(batch['segment_ids'])
    for r, index in enumerate(indices):
      # the values of the row's segments, and 0 for the padding, whose segment is 0
      of_examples = self._examples.preference[self._numbers[self._row(int(index))]]
      preferences[r] = np.array([0, *of_examples], np.int32)[batch['segment_ids'][r]]
    return batch | {'preferences': preferences}

  def _long(self, place: str, length: int) -> str:
    return f'{place}: {self._together} have {length:,} tokens; a sequence holds {self.seq_len:,}'


class RewardRows(PreferenceRows):
  """A RowSource of pairs for a reward model. `weights` is 1 at the last token of each answer.

  A language model predicts the last token of an answer, and does not read it. A reward model reads
  it, and gives the reward there. So a row has one more token of each answer.
  """

  reader = RewardReader


def pair_of(record: Fields) -> list[Pair | Conversation]:
  """Returns the chosen and the rejected answer of a record, each with its prompt.

  The prompt is `prompt`, or else a question, an instruction with its input, or messages. Answers
  that are messages follow it, unless they begin with it. Without a prompt, their prompt is what
  both begin with: messages, or a text up to the last blank before they differ.

  Raises:
    UserError: The record has another form, or no prompt.
  """
  chosen, rejected = record.get('chosen'), record.get('rejected')
  if chosen is None or rejected is None:
    hint = '; --method=kto reads labelled answers' if any(k in record for k in LABELS) else ''
    keys = ', '.join(record.keys()) or 'none'
    raise UserError(
      f'a pair needs "chosen" and "rejected", but this record has the keys {keys}{hint}'
    )
  prompt = _prompt_of(record)
  good, bad = list_of_messages(chosen), list_of_messages(rejected)
  if good is not None and bad is not None:
    return _answers_as_messages(record, prompt, good, bad)
  if good is None and bad is None and isinstance(chosen, str) and isinstance(rejected, str):
    return _answers_as_texts(record, prompt, chosen, rejected)
  raise UserError(_FORMS)


def _prompt_of(record: Fields) -> str | list[Message] | None:
  """Returns the prompt of a pair, as a text that is continued or as messages."""
  prompt = record.get('prompt')
  if prompt is not None:
    messages = list_of_messages(prompt)
    if messages is None and not isinstance(prompt, str):
      raise UserError(_FORMS)
    return prompt if messages is None else messages
  if question := record.text('question', 'query') or question_of(record):
    return [{'role': 'user', 'content': question}]
  for key in ('messages', 'conversations'):
    if not is_empty(given := record.get(key)):
      messages = list_of_messages(given)
      if messages is None:
        raise UserError(f'{key!r} must be a list of messages')
      while messages and role_of(messages[-1]) == 'assistant':  # the chosen answer, once more
        last = [*texts(messages.pop())]
        if not all(text in [*texts(record.get('chosen'))] for text in last):
          raise UserError(f'{key!r} ends with an answer that is not the chosen one: leave it out')
      return messages
  return None


def _answers_as_texts(
  record: Fields, prompt: str | list[Message] | None, chosen: str, rejected: str
) -> list[Pair | Conversation]:
  if isinstance(prompt, list):
    said = [[{'role': 'assistant', 'content': text}] for text in (chosen, rejected)]
    return [_chat(record, prompt, answer) for answer in said]
  if prompt is None:
    prompt = _common_text(chosen, rejected)
    if not prompt.strip():
      raise UserError(
        'the pair has no "prompt", and its answers share no beginning: write "prompt": "" for none'
      )
    chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
  return [Pair(prompt, chosen), Pair(prompt, rejected)]


def _answers_as_messages(
  record: Fields,
  prompt: str | list[Message] | None,
  chosen: list[Message],
  rejected: list[Message],
) -> list[Pair | Conversation]:
  answers = chosen, rejected
  shared = next(
    (i for i, (a, b) in enumerate(zip(*answers, strict=False)) if a != b),
    min(map(len, answers)),
  )
  before = chosen[:shared]
  asked = [text.strip() for m in before if role_of(m) not in _SYSTEMS for text in texts(m)]
  if not asked:  # the answers do not repeat the prompt
    stated = [{'role': 'user', 'content': prompt}] if isinstance(prompt, str) else prompt or []
    before = [*stated, *before] if isinstance(prompt, list) else [*before, *stated]
  else:
    told = [prompt] if isinstance(prompt, str) else [*texts(prompt or [])]
    repeats = [any(text.strip() in each for each in asked) for text in told if text.strip()]
    if isinstance(record.get('prompt'), list) and not any(repeats):
      before = [*(prompt or []), *before]
    elif not all(repeats):
      keys = ', '.join(key for key in (*_PROMPTS, 'input', 'context') if key in record)
      raise UserError(
        f'the prompt ({keys}) is not in the messages with which both answers begin: leave one out'
      )
  return [_chat(record, before, answer[shared:]) for answer in answers]


def _chat(record: Fields, prompt: Sequence[Message], answer: Sequence[Message]) -> Conversation:
  """Returns a conversation of which the messages after the prompt are learned."""
  if not answer:
    raise UserError('one answer is the beginning of the other, so nothing of it is left to compare')
  found = chat(record, [*prompt, *answer], len(prompt))
  if found.messages[-1]['role'] != 'assistant':
    raise UserError('an answer of a pair must end with a message of the role "assistant"')
  return found


def _common_text(one: str, other: str) -> str:
  """Returns what two texts begin with, up to and with the last blank in it."""
  end = 0
  for i, (a, b) in enumerate(zip(one, other, strict=False)):
    if a != b:
      break
    end = i + 1 if a.isspace() else end
  return one[:end]
