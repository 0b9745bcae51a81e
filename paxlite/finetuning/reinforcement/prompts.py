"""The prompts of rollouts."""

import dataclasses
import itertools
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paxlite.chats.chat_encoding import ChatEncoding
from paxlite.chats.conversations import Message, list_of_messages
from paxlite.chats.sft_formats import SYSTEM, chat, tools_beside
from paxlite.core.errors import UserError, located
from paxlite.core.fields import Fields
from paxlite.core.json_text import Json
from paxlite.core.shell import shortened
from paxlite.data.record_files import JsonLines, Raw, Record, Text
from paxlite.data.records import open_records, parsed, raw_records
from paxlite.data.refused_records import RefusedRecords
from paxlite.files.text_files import expanded


@dataclasses.dataclass(frozen=True)
class Prompt:
  """One prompt.

  Attributes:
    record: The whole record, which rewards get.
    ids: Its token ids.
    messages: Its messages; those of a prompt that is a text are none.
    place: Its file and line, for messages.
  """

  record: Record
  ids: list[int]
  messages: Sequence[Mapping[str, Any]]
  place: str

  def __str__(self) -> str:
    text = self.messages[-1]['content'] if self.messages else self.record['prompt']
    return f'{self.place} ({shortened(str(text))!r})'


class Prompts:
  """The prompts of records with "prompt": a text, or messages; or with "messages".

  An answer at the end of the messages is left out.

  Args:
    files: The files.
    encoding: Turns texts and conversations to ids.
    most_tokens: The most tokens of a prompt.
    skip_unreadable: Whether lines without a prompt, or with a longer one, are left out.

  Attributes:
    refused: The records that are left out.

  Raises:
    UserError: Lines have no prompt, or one that is empty or too long; or there is none.
  """

  def __init__(
    self,
    files: Sequence[str],
    encoding: ChatEncoding,
    most_tokens: int,
    skip_unreadable: bool = False,
  ):
    self.name = ', '.join(files)
    self.refused = RefusedRecords()
    raws = itertools.chain.from_iterable(map(_raw_records, expanded(files)))
    found = [
      self.refused.attempt(_prompt, raw, place, encoding, most_tokens) for place, raw in raws
    ]
    self.refused.check(self.name, skip_unreadable and not self.refused.is_all)
    self._prompts = [prompt for prompt in found if prompt is not None]
    if not self._prompts:
      raise UserError(f'{self.name or "TRAIN_FILES"}: no prompts')

  @property
  def fingerprint(self) -> int:
    """A number of the records; another one if they change."""
    records = json.dumps([prompt.record for prompt in self._prompts], default=str)
    return zlib.crc32(records.encode())

  @property
  def tokens_fingerprint(self) -> int:
    """A number of the tokens, which the tokenizer and the chat template change too."""
    return zlib.crc32(json.dumps([prompt.ids for prompt in self._prompts]).encode())

  def __len__(self) -> int:
    return len(self._prompts)

  def __getitem__(self, index: int) -> Prompt:
    return self._prompts[index]


def _raw_records(name: str) -> Iterator[tuple[str, Raw]]:
  """Yields the records of a file and their places; one that a text would have has JSON lines."""
  if not isinstance(open_records(name), Text):
    yield from raw_records(name)
    return
  lines = JsonLines(name)
  for number, raw in lines.read(0):
    yield lines.place(0, number), raw


def _prompt(raw: Raw, place: str, encoding: ChatEncoding, most: int) -> Prompt:
  record = parsed(raw, place)
  with located(place):
    conversation = list_of_messages(_given(Fields(record)))
  if conversation is not None:
    encoding.check_template(place)
  with located(place):
    ids, messages = _read(record, conversation, encoding, most)
  return Prompt(record, ids, messages, place)


def _given(fields: Fields) -> Json:
  return fields.get('messages') or fields.get('prompt')


def _read(
  record: Record, conversation: list[Message] | None, encoding: ChatEncoding, most: int
) -> tuple[list[int], Sequence[Mapping[str, Any]]]:
  """Returns the ids of a prompt, and its messages."""
  fields = Fields(record)  # rewards get all of them, so that what is not read here is not lost
  given = _given(fields)
  messages: Sequence[Mapping[str, Any]] = []
  if conversation is not None:
    whole = chat(fields, conversation)
    asked = [i for i, m in enumerate(whole.messages) if m['role'] != 'assistant']
    if not asked:
      raise UserError('the messages are those of the assistant alone')
    messages = whole.messages[: asked[-1] + 1]  # an answer at the end is one that others gave
    ids = encoding.chat_prompt(messages, whole.tools)
  elif isinstance(given, str):
    if fields.text(*SYSTEM) or tools_beside(fields):
      raise UserError('a prompt that is a text has no system message and no tools: write "prompt" '
                      'as messages, or leave them out')  # fmt: skip
    ids = encoding.prompt(given)
  else:
    raise UserError('it has neither a text or messages "prompt", nor "messages"')
  if not ids:
    raise UserError('the prompt is empty, and the model has no start token')
  if len(ids) > most:
    raise UserError(
      f'the prompt has {len(ids):,} tokens; with MAX_SEQ_LEN and MAX_NEW_TOKENS at most {most:,} '
      'are possible'
    )
  return ids, messages
