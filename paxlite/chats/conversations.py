"""Reads conversations: messages with roles, tool calls, and marks of what is learned."""

import dataclasses
from collections.abc import Mapping, Sequence

from paxlite.core.errors import UserError
from paxlite.core.fields import Fields, is_empty
from paxlite.core.json_text import Json, JsonObject
from paxlite.files.json_files import parse_text

Message = Mapping[str, Json]  # role and content, and perhaps tool_calls
Tool = Mapping[str, Json]
ROLES = ('system', 'user', 'assistant', 'tool')

_OTHER_ROLES = {'function': 'tool', 'developer': 'system'}
# the speakers of ShareGPT's turns, {"from": speaker, "value": text}
_SPEAKERS = {
  'human': 'user', 'gpt': 'assistant', 'chatgpt': 'assistant', 'model': 'assistant',
  'observation': 'tool', 'function_response': 'tool',
}  # fmt: skip
_CALLER = 'function_call'
_ARGUMENTS = 'arguments', 'parameters'  # the second is Llama's
_CALL = 'a tool call must be {"name": text, "arguments": object}, alone or in {"function": …}'
# The names of a message's reasoning. Templates get it under the first two, as from transformers.
REASONING = ('reasoning_content', 'thinking', 'reasoning')
# Keys by which trainers choose the answers that are learned: OpenAI and Mistral, axolotl, ms-swift,
# verl; and torchtune, whose key says the reverse.
_LEARNED = ('weight', 'train', 'training', 'loss', 'trainable', 'loss_mask', 'loss_scale')
_MASKED = ('masked',)
_NOT_READ = ('mask', 'train_detail', 'training_detail')
_TRUTH = {'true': True, '1': True, '1.0': True, 'false': False, '0': False, '0.0': False}
# what a message or a turn may have besides
_OF_TURNS = ('tool_calls', *REASONING, 'name', 'tool_call_id')


@dataclasses.dataclass(frozen=True)
class Conversation:
  """Messages in the form that chat templates expect."""

  # The messages. Each has a role of ROLES and a text as its content. The tool_calls of an assistant
  # are [{"type": "function", "function": {"name": text, "arguments": object}} …].
  messages: Sequence[Message]
  # descriptions of the functions that the assistant may call; None if there are none
  tools: Sequence[Tool] | None = None
  first_learned: int = 0  # number of the first message that may be learned
  # whether the last answer follows the prompt that asks for it, also where the template writes a
  # conversation that drops the thinking with which the prompt lets an answer begin
  as_asked: bool = False
  masked: frozenset[int] = frozenset()  # numbers of answers that are read and not learned

  @property
  def has_tools(self) -> bool:
    return bool(self.tools) or any(m['role'] == 'tool' or 'tool_calls' in m for m in self.messages)

  @property
  def learned(self) -> list[int]:
    """The numbers of the answers that are to be learned."""
    return [
      i
      for i, message in enumerate(self.messages)
      if message['role'] == 'assistant' and i >= self.first_learned and i not in self.masked
    ]


def conversation(
  messages: Json,
  tools: Json = None,
  first_learned: int = 0,
  fields: Fields | None = None,
  system: str = '',
  marks: Json = None,
) -> Conversation:
  """Returns messages and tools as a file has them in the form that chat templates expect.

  Messages are {"role": …, "content": …} or ShareGPT's {"from": …, "value": …}. A message may have
  tool_calls, or a function_call as OpenAI had it before. Calls and tools may lack the outer
  {"type": "function", "function": …}. Arguments, and the lists of tools and messages, may be JSON
  text. The role `function` is read as `tool`, and `developer` as `system`. Raises UserError if they
  are not messages, or have a role that is not in ROLES; an answer has a mark that is neither true
  nor false; or the messages begin with another system message.

  Args:
    first_learned: Number of the first message that may be learned.
    fields: The record of the messages; it learns which keys of the messages were not read.
    system: A system message that the record has beside its messages.
    marks: A mark for each message, as LLaMA-Factory has them beside the messages.
  """
  whole = Fields({}) if fields is None else fields
  found = list_of_messages(messages)
  if not found:
    raise UserError('"messages" must be a list of {"role": text, "content": text}, at least one')
  read = [
    (dict(m), None) if _is_plain(m) else _message(whole.object(m, f'messages[{i}]'))
    for i, m in enumerate(found)
  ]
  masks = [is_learned is False for _, is_learned in read]
  if not is_empty(marks):
    masks = [a or b for a, b in zip(masks, _masks(marks, len(found)), strict=True)]
  read_messages = [message for message, _ in read]
  if system:
    if read_messages[0]['role'] != 'system':
      read_messages.insert(0, {'role': 'system', 'content': system})
      masks.insert(0, False)
      first_learned += 1 if first_learned else 0
    elif read_messages[0]['content'].strip() != system.strip():
      raise UserError(
        'the record has a system message, but its messages begin with another: leave one out'
      )
  masked = frozenset(
    i
    for i, (message, mask) in enumerate(zip(read_messages, masks, strict=True))
    if mask and message['role'] == 'assistant'
  )
  return Conversation(read_messages, tools_of(tools), first_learned, masked=masked)


def list_of_messages(value: Json) -> list[Message] | None:
  """Returns messages as a list: given as a list, as one message, or as the JSON text of these.

  None: they are something else. Raises UserError if it is an object that has messages, whose other
  keys would be lost.
  """
  if isinstance(value, str) and value.lstrip()[:1] in ('[', '{'):
    try:
      value = parse_text(value)
    except ValueError:
      return None
  if isinstance(value, Mapping):
    for key in ('messages', 'conversations'):
      if isinstance(value.get(key), list | tuple):
        raise UserError(f'an object with {key!r} stands in place of messages: write the list '
                        'of messages itself, with the other keys next to it')  # fmt: skip
    value = [value]
  good = isinstance(value, list | tuple) and all(
    isinstance(m, Mapping) and isinstance(m.get('role', m.get('from')), str) for m in value
  )
  return list(value) if good else None


def _is_plain(message: Message) -> bool:
  """Returns whether a message has a role and a text, and nothing else, as most have."""
  is_said = len(message) == 2 and isinstance(message.get('content'), str)
  return is_said and message.get('role') in ROLES


def role_of(message: Message) -> str:
  """Returns the role of a message or of a turn, as far as it has a known one."""
  speaker = message.get('role', message.get('from'))
  role = _SPEAKERS.get(str(speaker).lower(), str(speaker).lower())
  return _OTHER_ROLES.get(role, role)


def _message(fields: Fields) -> tuple[Message, bool | None]:
  """Returns a message, and whether a mark of it says that it is learned."""
  is_learned = _mark(fields)
  speaker = fields.get('from') if 'role' not in fields else None
  if speaker is not None:
    role = _SPEAKERS.get(speaker.lower(), speaker.lower())
    value = fields.get('value')
    rest = {k: v for k, v in fields.values().items() if k in _OF_TURNS}
    said: JsonObject = {'content': value}
    if role == _CALLER:
      role, said = 'assistant', {'tool_calls': _calls_of_turn(value)}
    message = {**rest, 'role': role, **said}
  else:
    message = fields.values()
    message['role'] = _OTHER_ROLES.get(message['role'], message['role'])
  role = message['role']
  for key in _OF_TURNS if speaker is not None else ('role', 'content', _CALLER, *_OF_TURNS):
    fields.get(key)
  if role not in ROLES:
    raise UserError(f'a message has the role {role!r}: rename it to one of {", ".join(ROLES)}')
  if role == 'assistant':
    _check_marks(fields)
  call, calls = message.pop(_CALLER, None), message.pop('tool_calls', None)
  if call and calls:
    raise UserError('a message has both "function_call" and "tool_calls": leave one of them out')
  calls = calls or ([call] if call else [])
  if calls:
    if not isinstance(calls, list | tuple) or role != 'assistant':
      raise UserError('"tool_calls" must be a list, in a message of the assistant')
    message['tool_calls'] = [_tool_call(call, fields) for call in calls]
    message['content'] = message.get('content') or ''
  if isinstance(message.get('content'), list | tuple):
    message['content'] = _joined(message['content'], role, fields)
  if not isinstance(message.get('content'), str):
    raise UserError(f'the message of the {role} has no text "content"')
  return message, is_learned


def _mark(fields: Fields) -> bool | None:
  """Returns whether a message is marked as learned; None if it has no mark.

  Raises UserError if it has several marks that contradict each other.
  """
  found = {}
  for key in (*_LEARNED, *_MASKED):
    if key in fields:
      truth = _truth(fields.get(key))
      found[key] = truth if truth is None else truth != (key in _MASKED)
  if len({*found.values()}) > 1:
    raise UserError(f'the marks {", ".join(found)} of a message contradict each other')
  return next(iter(found.values()), None)


def _check_marks(fields: Fields) -> None:
  """Raises UserError if a mark of an answer says something else than yes or no."""
  for key in (*_LEARNED, *_MASKED):
    if key in fields and _truth(fields.get(key)) is None:
      raise UserError(
        f'{key}={fields.get(key)!r} of an answer must be 0, 1, false or true: an answer is either '
        'learned or not'
      )
  for key in _NOT_READ:
    if not is_empty(fields.get(key)):
      raise UserError(
        f'{key!r} of an answer is not supported: "weight": 0 excludes an answer from training'
      )


def _calls_of_turn(value: Json) -> Json:
  try:
    calls = parse_text(value or '')
  except (ValueError, TypeError):
    raise UserError(
      'the value of a turn from function_call must be the JSON text of {"name", "arguments"}, or '
      'of a list of these'
    ) from None
  return calls if isinstance(calls, list) else [calls]


def _joined(parts: Sequence[Json], role: str, message: Fields) -> str:
  """Returns the text of a content that is a list of parts; UserError if one of them is no text."""
  texts = []
  for part in parts:
    kind, text = type(part).__name__, part
    if isinstance(part, Mapping):
      fields = message.object(part, 'content')
      kind, text = fields.get('type') or 'text', fields.get('text')
    if kind not in ('text', 'str') or not isinstance(text, str):
      raise UserError(
        f'the message of the {role} has a part of type {kind!r} in its "content": only {{"type": '
        '"text", "text": …} is supported; leave it out'
      )
    texts.append(text)
  return ''.join(texts)


def _tool_call(given: Json, message: Fields) -> JsonObject:
  """Returns a call as {"type": "function", "function": …}; other keys, such as its id, are kept."""
  call = {k: v for k, v in given.items() if v is not None} if isinstance(given, Mapping) else {}
  inner = call.pop('function', None)
  if not isinstance(inner, Mapping | None) or (not call and inner is None):
    raise UserError(_CALL)
  outer = (
    {k: v for k, v in call.items() if k not in ('name', *_ARGUMENTS)} if inner is None else call
  )
  function = message.object(call if inner is None else inner, 'tool_calls')
  name, arguments = function.get('name'), function.one_of(*_ARGUMENTS)
  for key in outer:
    function.get(key)
  if isinstance(arguments, str) and arguments.strip():
    arguments = _parsed(arguments, f'"arguments" of the call of {name}')
  if not isinstance(name, str) or not isinstance(arguments or {}, Mapping):
    raise UserError(_CALL)
  return outer | {'type': 'function', 'function': {'name': name, 'arguments': arguments or {}}}


def _masks(marks: Json, count: int) -> list[bool]:
  """Returns whether each of `count` messages is masked by a list of marks."""
  truths = [_truth(x) for x in marks] if isinstance(marks, list | tuple) else []
  if len(truths) != count or None in truths:
    raise UserError(f'"loss_mask" must be a list with 0 or 1 for each of {count} messages')
  return [not x for x in truths]


def _truth(mark: Json) -> bool | None:
  return _TRUTH.get(str(mark).strip().lower())


def tools_of(given: Json) -> list[Tool] | None:
  """Returns descriptions of tools, each in {"type": "function", "function": …}.

  Raises UserError if they are something else.
  """
  if isinstance(given, str) and given.strip():
    given = _parsed(given, '"tools"')
  if is_empty(given) or isinstance(given, str):
    return None
  found = list(given) if isinstance(given, list | tuple) else []
  if not found or not all(isinstance(t, Mapping) and name_of_tool(t) for t in found):
    raise UserError('"tools" must be a list of {"name": text, "parameters": object, …}, or of '
                    '{"type": "function", "function": …}')  # fmt: skip
  return [t if 'function' in t else {'type': 'function', 'function': t} for t in found]


def name_of_tool(tool: Tool) -> str:
  """Returns the name of the function of a tool; '' if it has none."""
  function = tool.get('function', tool)
  name = function.get('name') if isinstance(function, Mapping) else None
  return name if isinstance(name, str) else ''


def _parsed(text: str, what: str) -> Json:
  try:
    return parse_text(text)
  except ValueError as e:
    raise UserError(f'{what} is not valid JSON: {e}') from None


def reasoning_of(message: Message) -> Json:
  """Returns the reasoning that a message has under a key; None if it has none."""
  return next((message[k] for k in REASONING if message.get(k) is not None), None)


def thinking_of(message: Message) -> str:
  """Returns the thinking of a message, under a key of its own or within its content, or ''."""
  stated = reasoning_of(message)
  if stated is None:
    before, end, _ = message['content'].partition('</think>')
    stated = before.rpartition('<think>')[2] if end else ''
  return str(stated).strip()
