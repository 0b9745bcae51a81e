"""The formats of records for fine-tuning, each found by the keys of a record."""

import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from json.encoder import encode_basestring as _quoted
from typing import Any, NamedTuple

from paxlite.chats.conversations import Conversation, conversation, list_of_messages
from paxlite.core.errors import UserError
from paxlite.core.fields import Fields, is_empty
from paxlite.core.json_text import Json
from paxlite.files.json_files import parse_text

LABELS = 'label', 'kto_tag'  # the keys that say whether an answer is a good one, for KTO
SYSTEM = 'system', 'system_prompt'  # the keys of a system message beside the messages

_TEXTS_ONLY = 'only text is supported: leave the record out'
_NO_WEIGHTS = 'record weights are not supported: leave it out, or repeat the record'
_MARKS = '"weight": 0 in a message excludes that answer from training'
_INSIDE = 'write it into the messages or the prompt'
# What changes what a model learns, and is refused where a format does not read it, unless the
# record says it in what is read, too. All other keys are counted, and said once.
_MEANT = {
  **dict.fromkeys(
    ('image', 'images', 'video', 'videos', 'audio', 'audios', 'objects'), _TEXTS_ONLY
  ),
  **dict.fromkeys(('weight', 'sample_weight', 'loss_weight'), _NO_WEIGHTS),
  **dict.fromkeys(
    ('loss_mask', 'completion_mask', 'assistant_masks', 'train', 'trainable', 'masked'), _MARKS
  ),
  **dict.fromkeys(
    (
      *SYSTEM, 'tools', 'functions', 'context', 'instruction', 'input', 'question', 'query',
      'prompt', 'history',
    ),
    _INSIDE,
  ),
  **dict.fromkeys(
    ('reasoning', 'reasoning_content', 'thinking'),
    'write it into the answer, or as "reasoning_content" of its message',
  ),
  'chat_template_kwargs': (
    'CHAT_THINKING sets for all records whether prompts ask for thinking'
  ),
  'margin': 'margins of pairs are not supported',
  'rejected_response': 'rename it to rejected, and the answer of the messages to chosen',
}  # fmt: skip
_LONG = 12  # characters of a text that is not in another one by chance
_REASONING = 'reasoning', 'reasoning_content', 'thinking'
# values that change nothing, as texts
_ONE, _ZERO = ('1', '1.0', 'true'), ('0', '0.0', 'false')
_NEUTRAL = {
  **dict.fromkeys(('weight', 'sample_weight', 'loss_weight', 'train', 'trainable'), _ONE),
  'masked': _ZERO,
}
_FLAGS = 'on', 'off', 'yes', 'no', *_ONE, *_ZERO  # of a record with or without reasoning
_MAY_REPEAT = frozenset(k for k, v in _MEANT.items() if v == _INSIDE) | {*_REASONING}
# Keys that describe a record and are not learned, so that nothing is said of them.
_DESCRIPTIONS = frozenset((
  'id', 'idx', 'index', 'uuid', 'key', 'hash', 'source', 'dataset', 'origin', 'url', 'license',
  'lang', 'language', 'split', 'category', 'domain', 'topic', 'tags', 'created', 'created_at',
  'timestamp', 'date', 'meta', 'metadata', 'num_turns', 'num_tokens', 'score', 'score_chosen',
  'score_rejected', 'model', 'parallel_tool_calls',
))  # fmt: skip


class Pair(NamedTuple):
  """A text and the text that continues it, which is learned."""

  inputs: str
  targets: str


class RecordFormat(NamedTuple):
  """A format of records."""

  name: str  # its name, for messages
  keys: tuple[str, ...]  # a record with all of these keys has this format
  # returns the contents of a record of this format; raises UserError if its values are not what
  # they must be
  read: Callable[[Fields], Conversation | Pair]


def format_of(record: Fields) -> RecordFormat:
  """Returns the format of a record.

  A key without a value does not count: JSON's null, '' and [], which tables have for what is
  absent. If there is no other format, '' counts, and the format refuses it. Raises UserError if the
  record has none of FORMATS; the message names its keys.
  """
  given = record.values()
  for is_there in (lambda value: not is_empty(value), lambda value: value is not None):
    for found in FORMATS:
      if all(is_there(given.get(key)) for key in found.keys):
        return found
  known = '; '.join(f'{" and ".join(f.keys)} ({f.name})' for f in FORMATS)
  keys = ', '.join(given) or 'none'
  raise UserError(
    f'the keys of this record ({keys}) match no format for fine-tuning: rename them to {known}'
  )


def check_unread(record: Fields, contents: Sequence[Conversation | Pair]) -> list[str]:
  """Returns the keys of a record that nobody has read, and that are not known to be harmless.

  Raises UserError if one of them changes what a model learns; the message says what to do.

  Args:
    record: The record, after it was read.
    contents: What was read of it.
  """
  describes = lambda name: name in _DESCRIPTIONS or name.endswith('_id')
  unread = [key for key in record.unread() if not describes(key.rpartition('.')[2])]
  if not unread:
    return unread
  given, said = record.values(), list[str]()
  for key in unread:
    base, dot, name = key.rpartition('.')
    if dot and _MEANT.get(name) == _TEXTS_ONLY:
      raise UserError(f'{name!r} of {base} is not read: {_TEXTS_ONLY}')
    if key not in _MEANT or str(given[key]).strip().lower() in _NEUTRAL.get(key, ()):
      continue
    if _is_flag(key, given[key]):
      continue
    said = said or [
      text.strip()
      for c in contents
      for text in texts(list(c) if isinstance(c, Pair) else c.messages)
    ]
    if key not in _MAY_REPEAT or not _is_said(given[key], said):
      raise UserError(f'{key!r} of this record is not read: {_MEANT[key]}')
  return [key for key in unread if key not in _MEANT or _is_flag(key, given[key])]


def _is_flag(key: str, value: Json) -> bool:
  """Whether a key says only that a record has reasoning, or has none."""
  return key in _REASONING and str(value).strip().lower() in _FLAGS


def _is_said(value: Json, said: Sequence[str]) -> bool:
  """Whether the texts of a value and those that were read say the same.

  Each is one of those that were read, or is in them and too long to be so by chance. Or one has all
  of those in it, as a prompt that was made of an instruction, an input and an output.
  """
  given = [text.strip() for text in texts(value)]
  whole = '\n'.join(said)
  if len(given) == 1 and all(text in given[0] for text in said):
    return True
  return bool(given) and all(
    text in said or (len(text) >= _LONG and text in whole) for text in given
  )


def texts(value: Json) -> Iterator[str]:
  """Yields the texts of messages, or of another value, without roles."""
  if isinstance(value, str):
    yield value
  elif isinstance(value, Mapping):
    for key, part in value.items():
      if key not in ('role', 'from'):
        yield from texts(part)
  elif isinstance(value, list | tuple):
    for part in value:
      yield from texts(part)


def identity(contents: Conversation | Pair) -> int:
  """Returns a checksum of what a record says, whichever keys, files and order of keys say it.

  It depends on neither a tokenizer nor a template, so that the same records are held out with any.
  """
  if isinstance(contents, Pair):
    said: Json = list(contents)
  else:
    said = [contents.messages, contents.tools, contents.first_learned]
    said += [sorted(contents.masked)] if contents.masked else []
  text = _of_plain_chat(contents) or json.dumps(
    _stated(said), sort_keys=True, ensure_ascii=False, default=repr
  )
  return zlib.crc32(text.encode('utf-8', 'surrogatepass'))


def _of_plain_chat(contents: Conversation | Pair) -> str:
  """Returns the JSON of a conversation that has roles and texts alone, as most; '' for others."""
  if isinstance(contents, Pair) or contents.tools is not None or contents.masked:
    return ''
  texts: list[Any] = [(m.get('content'), m.get('role')) for m in contents.messages if len(m) == 2]
  if len(texts) < len(contents.messages) or not all(type(t) is str for pair in texts for t in pair):
    return ''
  said = (f'{{"content": {_quoted(c)}, "role": {_quoted(r)}}}' for c, r in texts)
  return f'[[{", ".join(said)}], null, {contents.first_learned}]'


def _stated(value: object) -> object:
  """Returns a value without keys that have no value, which a table has for what is absent."""
  if isinstance(value, Mapping):
    return {str(k): _stated(v) for k, v in value.items() if v is not None}
  return [_stated(v) for v in value] if isinstance(value, list | tuple) else value


def tools_beside(record: Fields) -> Json:
  """Returns the tools that a record has beside its messages; OpenAI called them functions."""
  return record.one_of('tools', 'functions')


def chat(record: Fields, messages: Json, first_learned: int = 0) -> Conversation:
  """Returns messages of a record with its tools and its system message.

  Raises UserError if they are not as conversation() needs them.
  """
  system, marks = record.text(*SYSTEM), record.get('loss_mask')
  return conversation(messages, tools_beside(record), first_learned, record, system, marks)


def _chat_under(key: str) -> Callable[[Fields], Conversation]:
  def read(record: Fields) -> Conversation:
    messages = record.get(key)
    if isinstance(messages, str):
      try:
        messages = parse_text(messages)
      except ValueError as e:
        raise UserError(f'{key!r} is not valid JSON: {e}') from None
    if not list_of_messages(messages):
      raise UserError(f'"{key}" must be a list of {{"role": text, "content": text}}, at least one')
    return chat(record, messages)

  return read


def _pair(inputs: str, targets: str) -> Callable[[Fields], Pair]:
  return lambda record: Pair(_text(record, inputs), _text(record, targets))


def _prompt_and_completion(record: Fields) -> Conversation | Pair:
  """Reads two strings, or two lists of messages; answers within the prompt are not learned."""
  prompt, completion = record.get('prompt'), record.get('completion')
  before, after = list_of_messages(prompt), list_of_messages(completion)
  if before is not None and after is not None:
    return chat(record, [*before, *after], len(before))
  if not isinstance(prompt, str) or not isinstance(completion, str):
    raise UserError('"prompt" and "completion" must be two strings, or two lists of messages')
  return Pair(prompt, completion)


def _alpaca(record: Fields) -> Conversation:
  """Reads an instruction and its output; an input is put below the instruction."""
  history = record.get('history') or []
  is_turn = lambda x: isinstance(x, list | tuple) and len(x) == 2
  if not isinstance(history, list | tuple) or not all(map(is_turn, history)):
    raise UserError('"history" must be a list of [question, answer]')
  earlier = [
    {'role': role, 'content': text}
    for turn in history
    for role, text in zip(('user', 'assistant'), turn, strict=True)
  ]
  last = {'user': question_of(record), 'assistant': record.text('output', 'response')}
  return chat(
    record, [*earlier, *({'role': role, 'content': text} for role, text in last.items() if text)]
  )


def question_of(record: Fields) -> str:
  """Returns the instruction of a record and, below it, its input, which Dolly calls context."""
  parts = [record.text('instruction'), record.text('input', 'context')]
  return '\n\n'.join(part for part in parts if part)


def _text(record: Fields, key: str) -> str:
  value = record.get(key)
  if not isinstance(value, str):
    raise UserError(f'{key!r} must be a string')
  return value


FORMATS = (
  RecordFormat('a chat', ('messages',), _chat_under('messages')),
  RecordFormat('a prompt and its answer', ('inputs', 'targets'), _pair('inputs', 'targets')),
  RecordFormat(
    'a prompt and its answer, as text or messages', ('prompt', 'completion'), _prompt_and_completion
  ),
  RecordFormat('ShareGPT', ('conversations',), _chat_under('conversations')),
  RecordFormat('Alpaca', ('instruction', 'output'), _alpaca),
  RecordFormat('Dolly', ('instruction', 'response'), _alpaca),
)
