"""Preferences: pairs of a chosen and a rejected answer to one prompt, packed into rows.

The array `preferences` [B, T] of a batch says what each token belongs to: 1 is a chosen answer, or
one that is labelled as good, and −1 a rejected or a bad one, both with their prompts. 2 and −2 are
answers to other prompts beside them: see labelled_answers.py. 0 is padding.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from paxlite.core.errors import UserError
from paxlite.core.json_text import Json
from paxlite.data.base import Batch
from paxlite.data.chat_format import Conversation, conversation
from paxlite.data.record_files import Record
from paxlite.data.sft import SftExample, SftRows, TooLong
from paxlite.data.sft_formats import Pair, identity

KEYS = 'chosen', 'rejected'
_FORMS = (
  '"chosen" and "rejected" must be two answers to "prompt", as strings or as lists of messages, or '
  'two whole conversations or texts with one beginning'
)


class PreferenceRows(SftRows):
  """A RowSource of pairs; both answers of a pair are in one row, as segments 2i − 1 and 2i.

  The chosen answer comes first. What the model is asked for are the answers: weights are 1 there.
  The arguments and attributes are those of SftRows, of which a record has two examples.

  Raises:
    UserError: A record has another form, both answers are the same, or it is too long for a row.
  """

  examples_of_a_record = 2
  noun = 'pair'
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
      values = [0, *(self._examples[number].preference for number in self._rows[index])]
      preferences[r] = np.array(values, np.int32)[batch['segment_ids'][r]]
    return batch | {'preferences': preferences}

  def _read(self, place: str, record: Record) -> list[SftExample]:
    chosen, rejected = super()._read(place, record)
    return [dataclasses.replace(chosen, preference=1), dataclasses.replace(rejected, preference=-1)]

  @staticmethod
  def contents_of(record: Record) -> list[Pair | Conversation]:
    """Returns the chosen and the rejected answer; UserError if there is no difference."""
    for key in KEYS:
      if record.get(key) in ('', []):
        raise UserError(f'{key!r} is empty: there is no answer to learn from')
    answers = pair_of(record)
    if identity(answers[0]) == identity(answers[1]):
      raise UserError('"chosen" and "rejected" are the same: a pair must have a difference')
    return answers

  @staticmethod
  def _format(record: Record) -> str:
    return ' and '.join(key for key in ('prompt', *KEYS) if record.get(key) is not None)

  def _add(self, examples: list[SftExample], place: str, too_long: TooLong) -> None:
    length, most = sum(len(e.ids) - 1 for e in examples), self.seq_len
    if length > most:
      long = f'{place}: {self._together} have {length:,} tokens, a row holds {most:,}'
      self.first_long = self.first_long or long
      if too_long == 'error':
        raise UserError(f'{long}: raise --fdl.MAX_SEQ_LEN, or --fdl.TOO_LONG=skip')
      self.num_skipped += 1
      return
    self._examples += examples


def pair_of(record: Record) -> list[Pair | Conversation]:
  """Returns the chosen and the rejected answer of a record, each with its prompt.

  Lists of messages follow the prompt, if that is a list. Otherwise their prompt is what they begin
  with, or else the message that `prompt` is. Two texts without a prompt have as their prompt what
  they begin with, up to the last blank before they differ.

  Raises:
    UserError: The record has another form.
  """
  prompt, chosen, rejected = (record.get(key) for key in ('prompt', 'chosen', 'rejected'))
  if chosen is None or rejected is None:
    keys = ', '.join(k for k, v in record.items() if v is not None) or 'none'
    hint = '' if record.get('label') is None else '; --method=kto reads labelled answers'
    raise UserError(
      f'a pair has "chosen" and "rejected", and the keys of this record are {keys}{hint}'
    )
  if isinstance(chosen, str) and isinstance(rejected, str):
    if prompt is None:
      prompt = _common_text(chosen, rejected)
      chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    if isinstance(prompt, str):
      return [Pair(prompt, chosen), Pair(prompt, rejected)]
    if isinstance(prompt, list):
      said = [[{'role': 'assistant', 'content': text}] for text in (chosen, rejected)]
      return [_chat(record, prompt, answer) for answer in said]
  if isinstance(chosen, list) and isinstance(rejected, list):
    if isinstance(prompt, list):
      return [_chat(record, prompt, answer) for answer in (chosen, rejected)]
    shared = next(
      (i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b),
      min(len(chosen), len(rejected)),
    )
    before = chosen[:shared]
    if isinstance(prompt, str) and not before:
      before = [{'role': 'user', 'content': prompt}]
    return [_chat(record, before, answer[shared:]) for answer in (chosen, rejected)]
  raise UserError(_FORMS)


def _chat(record: Record, prompt: list[Json], answer: list[Json]) -> Conversation:
  """Returns a conversation of which the messages after the prompt are learned."""
  if not answer:
    raise UserError('one answer is the beginning of the other, and nothing of it is left to prefer')
  last = answer[-1]
  if not isinstance(last, Mapping) or last.get('role') != 'assistant':
    raise UserError('an answer of a pair must end with a message of the role "assistant"')
  return conversation([*prompt, *answer], record.get('tools'), len(prompt))


def _common_text(one: str, other: str) -> str:
  """Returns what two texts begin with, up to and with the last blank in it."""
  end = 0
  for i, (a, b) in enumerate(zip(one, other, strict=False)):
    if a != b:
      break
    end = i + 1 if a.isspace() else end
  return one[:end]
