"""The formats of records for fine-tuning, each found by the keys of a record."""

import json
import zlib
from collections.abc import Callable, Mapping
from typing import NamedTuple

from paxlite.core.errors import UserError
from paxlite.core.json_text import Json
from paxlite.data.chat_format import Conversation, conversation
from paxlite.data.record_files import Record
from paxlite.files.json_files import parse_text

LABEL = 'label'  # the key that says whether an answer is a good one, for KTO


class Pair(NamedTuple):
  """A text and the text that continues it, which is learned."""

  inputs: str
  targets: str


class Format(NamedTuple):
  """A format of records.

  Attributes:
    name: Its name, for messages.
    keys: A record with all of these keys has this format.
    read: Returns the contents of a record of this format; raises UserError if its values are not
      what they must be.
  """

  name: str
  keys: tuple[str, ...]
  read: Callable[[Record], Conversation | Pair]


def format_of(record: Record) -> Format:
  """Returns the format of a record.

  A key without a value (JSON's null, or a missing value of Parquet) does not count.

  Raises:
    UserError: The record has none of FORMATS; the message names its keys.
  """
  if record.get('chat_template_kwargs'):
    raise UserError(
      '"chat_template_kwargs" of a record is not read: --fdl.CHAT_THINKING says for all records '
      'whether prompts ask for thinking'
    )
  for found in FORMATS:
    if all(record.get(key) is not None for key in found.keys):
      return found
  known = '; '.join(f'{" and ".join(f.keys)} ({f.name})' for f in FORMATS)
  keys = ', '.join(k for k, v in record.items() if v is not None) or 'none'
  raise UserError(
    f'the keys of this record ({keys}) match no format for fine-tuning: rename them to {known}'
  )


def identity(contents: Conversation | Pair) -> int:
  """Returns a checksum of what a record says, whichever keys, files and order of keys say it.

  It depends on neither a tokenizer nor a template, so that the same records are held out with any.
  """
  if isinstance(contents, Pair):
    said: Json = list(contents)
  else:
    said = [contents.messages, contents.tools, contents.first_learned]
  text = json.dumps(_stated(said), sort_keys=True, ensure_ascii=False, default=repr)
  return zlib.crc32(text.encode('utf-8', 'surrogatepass'))


def _stated(value: object) -> object:
  """Returns a value without keys that have no value, which a table has for what is absent."""
  if isinstance(value, Mapping):
    return {str(k): _stated(v) for k, v in value.items() if v is not None}
  return [_stated(v) for v in value] if isinstance(value, list | tuple) else value


def _pair(inputs: str, targets: str) -> Callable[[Record], Pair]:
  return lambda record: Pair(_text(record, inputs), _text(record, targets))


def _prompt_and_completion(record: Record) -> Conversation | Pair:
  """Reads two strings, or two lists of messages; answers within the prompt are not learned."""
  prompt, completion = record['prompt'], record['completion']
  if isinstance(prompt, list) and isinstance(completion, list):
    return conversation([*prompt, *completion], record.get('tools'), len(prompt))
  if not isinstance(prompt, str) or not isinstance(completion, str):
    raise UserError('"prompt" and "completion" must be two strings, or two lists of messages')
  return Pair(prompt, completion)


_SPEAKERS = {'human': 'user', 'gpt': 'assistant', 'observation': 'tool'}


def _sharegpt(record: Record) -> Conversation:
  """Reads turns {"from": speaker, "value": text}, or messages under the key of ShareGPT."""
  turns = _parsed(record, 'conversations')
  messages = [_message_of_turn(t) for t in turns] if isinstance(turns, list) else turns
  if messages and isinstance(messages, list) and (system := _optional(record, 'system')):
    first = messages[0]
    if not isinstance(first, Mapping) or first.get('role') != 'system':
      messages = [{'role': 'system', 'content': system}, *messages]
  return conversation(messages, record.get('tools'))


def _message_of_turn(turn: Json) -> Json:
  if not isinstance(turn, Mapping) or 'from' not in turn:
    return turn
  speaker, value = turn['from'], turn.get('value')
  if speaker != 'function_call':
    return {'role': _SPEAKERS.get(str(speaker), speaker), 'content': value}
  try:
    calls = parse_text(value or '')
  except (ValueError, TypeError):
    raise UserError(
      'the value of a turn from function_call must be the JSON text of {"name", "arguments"}, or '
      'of a list of these'
    ) from None
  return {'role': 'assistant', 'tool_calls': calls if isinstance(calls, list) else [calls]}


def _alpaca(record: Record) -> Conversation:
  """Reads an instruction and its output; an input is put below the instruction."""
  if record.get('history'):
    raise UserError('"history" is not read: write the conversation as messages')
  question = [text for key in ('instruction', 'input') if (text := _optional(record, key))]
  contents = {
    'system': _optional(record, 'system'),
    'user': '\n\n'.join(question),
    'assistant': _text(record, 'output'),
  }
  return conversation([{'role': role, 'content': text} for role, text in contents.items() if text])


def _parsed(record: Record, key: str) -> Json:
  """Returns a list, which a table may have as JSON text."""
  value = record[key]
  try:
    return parse_text(value) if isinstance(value, str) else value
  except ValueError as e:
    raise UserError(f'{key!r} is not valid JSON: {e}') from None


def _text(record: Record, key: str) -> str:
  value = record[key]
  if not isinstance(value, str):
    raise UserError(f'{key!r} must be a string')
  return value


def _optional(record: Record, key: str) -> str:
  return _text(record, key) if record.get(key) is not None else ''


FORMATS = (
  Format('a chat', ('messages',), lambda r: conversation(_parsed(r, 'messages'), r.get('tools'))),
  Format('a prompt and its answer', ('inputs', 'targets'), _pair('inputs', 'targets')),
  Format(
    'a prompt and its answer, as text or messages', ('prompt', 'completion'), _prompt_and_completion
  ),
  Format('ShareGPT', ('conversations',), _sharegpt),
  Format('Alpaca', ('instruction', 'output'), _alpaca),
)
