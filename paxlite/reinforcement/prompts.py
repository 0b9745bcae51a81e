"""The prompts of rollouts, from JSON lines."""

import dataclasses
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from paxlite.core.errors import UserError, located
from paxlite.core.fields import Fields
from paxlite.core.json_text import JsonObject
from paxlite.data.conversations import list_of_messages
from paxlite.data.sft_formats import SYSTEM, chat, tools_beside
from paxlite.data.text_encoding import TextEncoding
from paxlite.files.json_files import read_json_lines
from paxlite.files.text_files import expanded


@dataclasses.dataclass(frozen=True)
class Prompt:
  """One prompt.

  Attributes:
    record: Its JSON object, which rewards get.
    ids: Its token ids.
    messages: Its messages; those of a prompt that is a text are none.
    place: Its file and line, for messages.
  """

  record: JsonObject
  ids: list[int]
  messages: Sequence[Mapping[str, Any]]
  place: str


class Prompts:
  """The prompts of JSON lines with "prompt": a text, or messages; or with "messages".

  An answer at the end of the messages is left out.

  Args:
    files: The files.
    encoding: Turns texts and conversations to ids.
    most_tokens: The most tokens of a prompt.

  Raises:
    UserError: A line has no prompt, or one that is empty or too long; or there is none.
  """

  def __init__(self, files: Sequence[str], encoding: TextEncoding, most_tokens: int):
    self.name = ', '.join(files)
    self._prompts: list[Prompt] = []
    for file in expanded(files):
      for place, record in read_json_lines(file):
        with located(place):
          self._prompts.append(_prompt(record, encoding, place, most_tokens))
    if not self._prompts:
      raise UserError(f'{self.name or "TRAIN_FILES"}: no prompts')

  @property
  def fingerprint(self) -> int:
    """A number of the records; another one if they change."""
    return zlib.crc32(json.dumps([prompt.record for prompt in self._prompts]).encode())

  @property
  def tokens_fingerprint(self) -> int:
    """A number of the tokens, which the tokenizer and the chat template change too."""
    return zlib.crc32(json.dumps([prompt.ids for prompt in self._prompts]).encode())

  def __len__(self) -> int:
    return len(self._prompts)

  def __getitem__(self, index: int) -> Prompt:
    return self._prompts[index]


def _prompt(record: JsonObject, encoding: TextEncoding, place: str, most: int) -> Prompt:
  fields = Fields(record)  # rewards get all of them, so that what is not read here is not lost
  given = fields.get('messages') or fields.get('prompt')
  conversation = list_of_messages(given)
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
  return Prompt(record, ids, messages, place)
