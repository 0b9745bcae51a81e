"""The prompts of rollouts."""

import dataclasses
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paxlite.chats.chat_encoding import ChatEncoding
from paxlite.chats.conversations import Tool, list_of_messages
from paxlite.chats.sft_formats import SYSTEM, chat, tools_beside
from paxlite.core.errors import UserError, located
from paxlite.core.fields import Fields
from paxlite.core.json_text import Json, JsonObject
from paxlite.core.shell import shortened
from paxlite.data.record_files import JsonLines, Raw, Record, Text
from paxlite.data.records import Records, open_records, parsed
from paxlite.files.text_files import expanded
from paxlite.finetuning.chats.encoded_examples import SftExample
from paxlite.finetuning.chats.example_files import read_examples
from paxlite.finetuning.chats.example_reader import KeepingReader, ReaderOptions
from paxlite.finetuning.example_cache import ArrayWriter, ExampleCache, in_memory
from paxlite.finetuning.reinforcement.user_processes import IMPORT_SECONDS, Call, UserProcesses

SCHEMAS = 'paxlite.finetuning.reinforcement.tools.schemas'


@dataclasses.dataclass(frozen=True)
class Prompt:
  """One prompt.

  Attributes:
    record: The whole record, which rewards get.
    ids: Its token ids.
    messages: Its messages; those of a prompt that is a text are none.
    place: Its file and line, for messages.
    tools: The descriptions of the functions that answers may call.
  """

  record: Record
  ids: list[int]
  messages: Sequence[Mapping[str, Any]]
  place: str
  tools: Sequence[Tool] | None = None

  def __str__(self) -> str:
    text = self.messages[-1]['content'] if self.messages else self.record['prompt']
    return f'{self.place} ({shortened(str(text))!r})'


class PromptReader(KeepingReader):
  """Reads a record as a prompt of at most `most_tokens`; one that a text would have is a line."""

  @staticmethod
  def open(name: str) -> Records:
    source = open_records(name)
    return JsonLines(name) if isinstance(source, Text) else source

  def read(self, place: str, raw: Raw) -> list[SftExample]:
    record = parsed(raw, place)
    with located(place):
      is_chat = list_of_messages(_given(Fields(record))) is not None
    if is_chat:
      self.encoding.check_template(place)
    with located(place):
      ids = self.ids(record)
      self.check(record)
    self.keep(record)
    return [SftExample(np.array(ids, np.int32), np.zeros(len(ids), bool), 0, place=place)]

  def check(self, record: Record) -> None:
    """Raises UserError if a further part of a record cannot be read."""

  def ids(self, record: Record) -> list[int]:
    """Returns the ids of the prompt of a record."""
    messages, tools = _messages(record, self.tools)
    if messages:
      ids = self.encoding.chat_prompt(messages, tools)
    else:
      ids = self.encoding.prompt(str(_given(Fields(record))))
    if not ids:
      raise UserError('the prompt is empty, and the model has no start token')
    if len(ids) > self.most_tokens:
      raise UserError(
        f'the prompt has {len(ids):,} tokens; MAX_SEQ_LEN and MAX_NEW_TOKENS allow at most '
        f'{self.most_tokens:,}'
      )
    return ids


class Prompts:
  """The prompts of records with "prompt": a text, or messages; or with "messages".

  An answer at the end of the messages is left out.

  Args:
    files: The files.
    encoding: Turns texts and conversations to ids.
    most_tokens: The most tokens of a prompt.
    skip_unreadable: Whether lines without a prompt, or with a longer one, are left out.
    cache: Where many prompts are kept: see ExampleCache.
    reader: Reads records.
    tools: Dotted paths of functions that answers may call.

  Attributes:
    reader: The reader, which encodes further parts of records.
    refused: The records that are left out.
    fingerprint: A number of the records; another one if they change.
    tokens_fingerprint: A number of the tokens, which the tokenizer and the chat template change
      too.

  Raises:
    UserError: Lines have no prompt, or one that is empty or too long; or there is none.
  """

  def __init__(
    self,
    files: Sequence[str],
    encoding: ChatEncoding,
    most_tokens: int,
    skip_unreadable: bool = False,
    cache: str = '',
    reader: type[PromptReader] = PromptReader,
    tools: Sequence[str] = (),
  ):
    self.name = ', '.join(files)
    kept = ExampleCache(cache)
    self._tools = _schemas(tools)
    options = ReaderOptions(
      reader,
      encoding.tokenizer.path,
      *encoding.options,
      most_tokens=most_tokens,
      tools=self._tools,
    )
    self.reader = reader(encoding, most_tokens, self._tools)
    self._found = read_examples(expanded(files), options, self.reader, kept)
    self.refused = self._found.notes.refused
    self.refused.check(self.name, skip_unreadable and not self.refused.is_all)
    if not len(self._found):
      raise UserError(f'{self.name or "TRAIN_FILES"}: no prompts')
    key = self._found.key
    facts = (kept.get({'prompts': key}, self._facts) if key else in_memory(self._facts)).facts
    self.fingerprint, self.tokens_fingerprint = facts['fingerprint'], facts['tokens']

  def _facts(self, writer: ArrayWriter) -> JsonObject:
    records = tokens = zlib.crc32(b'[')
    for number in range(len(self)):
      comma = b', ' if number else b''
      records = zlib.crc32(comma + self._found.kept_record(number), records)
      tokens = zlib.crc32(comma + json.dumps(self._ids(number)).encode(), tokens)
    return {'fingerprint': zlib.crc32(b']', records), 'tokens': zlib.crc32(b']', tokens)}

  def _ids(self, number: int) -> list[int]:
    found = self._found
    ids: list[int] = found.example(number, int(found.length[number])).ids.tolist()
    return ids

  def __len__(self) -> int:
    return len(self._found)

  def __getitem__(self, index: int) -> Prompt:
    place = str(self._found.place(index))
    record = parsed(self._found.kept_record(index), place)
    messages, tools = _messages(record, self._tools)
    return Prompt(record, self._ids(index), messages, place, tools)


def _given(fields: Fields) -> Json:
  return fields.get('messages') or fields.get('prompt')


def _schemas(paths: Sequence[str]) -> Sequence[Tool]:
  """Returns the schemas of functions, which are imported in another process."""
  if not paths:
    return ()
  processes = UserProcesses(1, IMPORT_SECONDS)
  try:
    found: Sequence[Tool] = processes.results([Call(SCHEMAS, None, [list(paths)])])[0]
    return found
  finally:
    processes.close()


def _messages(
  record: Record, more: Sequence[Tool] = ()
) -> tuple[Sequence[Mapping[str, Any]], Sequence[Tool] | None]:
  """Returns the messages of a prompt and its tools, with `more`; those of a text are none."""
  fields = Fields(record)  # rewards get all of them, so that what is not read here is not lost
  given = _given(fields)
  conversation = list_of_messages(given)
  if conversation is not None:
    whole = chat(fields, conversation)
    asked = [i for i, m in enumerate(whole.messages) if m['role'] != 'assistant']
    if not asked:
      raise UserError("all messages are the assistant's")
    # an answer at the end is one that others gave
    return whole.messages[: asked[-1] + 1], [*(whole.tools or ()), *more] or None
  if not isinstance(given, str):
    raise UserError('it needs "prompt" (text or messages) or "messages"')
  if fields.text(*SYSTEM) or tools_beside(fields) or more:
    raise UserError(
      'system messages and tools need messages: write "prompt" as messages, or leave them out'
    )
  return [], None
