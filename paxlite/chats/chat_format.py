"""The text that the chat template of a model writes for a conversation."""

import datetime
import itertools
import pathlib
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from paxlite.chats.budget import BUDGET, Budget
from paxlite.chats.chat_template import GENERATION, MAX_TEMPLATE_CHARS, environment
from paxlite.chats.conversations import Conversation, Message, Tool, name_of_tool, reasoning_of
from paxlite.core import shell
from paxlite.core.errors import UserError
from paxlite.data.tokenizer_files import (
  CHAT_TEMPLATE,
  CONFIGURATION,
  TOOL_TEMPLATE,
  configuration,
  special_tokens,
)
from paxlite.files import schemes
from paxlite.files.text_files import read_text

_MARKS = re.compile('|'.join(map(re.escape, GENERATION)))
_GENERATION_TAG = re.compile(r'\{%[-+]?\s*generation\s*[-+]?%\}')
_WORD, _MOST_WORDS = re.compile(r'\w+'), 1000
_THINKING = re.compile(r'\b(enable_thinking|thinking)\b')


class RenderedChat(NamedTuple):
  """The text of a conversation."""

  text: str
  # first and last + 1 character of each {% generation %} block of the template
  generated: list[tuple[int, int]]


class NoTemplate(UserError):
  """Raised where a tokenizer comes without a chat template."""


class ChatFormat:
  """Writes a conversation as one text, with the Jinja template of a model.

  Args:
    template: The Jinja template; '' takes the one in the tokenizer's folder (chat_template.jinja
      or tokenizer_config.json). Of several templates, `tool_use` writes conversations with tools
      and `default` the others, as in transformers.
    tokenizer_path: The tokenizer file. Its folder holds the template and the special tokens.
    date: The day that the template sees, as 2026-11-26; '': the present time.
    tokens: The texts of bos_token, eos_token …; None: those that the tokenizer's folder names.

  Attributes:
    reads_clock: Whether what it writes depends on the time.
    has_thinking: Whether it writes a conversation in another way where thinking is turned off.
    text: The template, as it was found.
    texts: All templates by their names, of which one is `default`.

  Raises:
    NoTemplate: There is no template.
    UserError: It is not a Jinja template.
  """

  def __init__(
    self,
    template: str,
    tokenizer_path: str,
    date: str = '',
    tokens: Mapping[str, str] | None = None,
  ):
    try:
      import jinja2  # noqa: F401
    except ImportError:
      raise UserError(f'a chat needs the package jinja2: {shell.install("weights")}') from None
    if template and '{' not in template:
      raise UserError(
        f'CHAT_TEMPLATE={template[:80]!r} is neither a template nor the name of a file'
      )
    self._budget = Budget()
    self._now: Callable[[], datetime.datetime] = datetime.datetime.now
    if date:
      day = datetime.datetime.fromisoformat(date)
      self._now = lambda: day
    texts = {'default': template} if template else _chat_templates(tokenizer_path)
    self.texts, self.text = texts, texts['default']
    self.reads_clock = any('strftime_now' in text for text in texts.values())
    self.has_thinking = any(_THINKING.search(text) for text in texts.values())
    self._marking = {name for name, text in texts.items() if _GENERATION_TAG.search(text)}
    self._templates = {name: self._compiled(text) for name, text in texts.items()}
    self._tokens = special_tokens(tokenizer_path) if tokens is None else dict(tokens)
    self._lock = threading.Lock()

  def _compiled(self, template: str) -> Any:
    if len(template) > MAX_TEMPLATE_CHARS:
      raise UserError(
        f'the chat template has {len(template):,} characters; the limit is {MAX_TEMPLATE_CHARS:,}'
      )
    try:
      return environment(self._budget, lambda: self._now()).from_string(template)
    except Exception as e:  # Jinja compiles to Python code, so Python's compiler may raise too
      raise UserError(f'the chat template is not a valid Jinja template: {_described(e)}') from None

  def render(
    self,
    messages: Sequence[Message],
    prompt: bool,
    tools: Sequence[Tool] | None = None,
    thinking: bool | None = None,
  ) -> str:
    """Returns the text of the conversation; see `written`."""
    return self.written(messages, prompt, tools, thinking).text

  @property
  def eos_token(self) -> str:
    """The text of the stop token; '' if there is none."""
    return self._tokens.get('eos_token', '')

  def marks_learned(self, tools: Sequence[Tool] | None = None) -> bool:
    """Returns whether the template says by {% generation %} which text is learned."""
    return self._name(tools) in self._marking

  def written(
    self,
    messages: Sequence[Message],
    prompt: bool,
    tools: Sequence[Tool] | None = None,
    thinking: bool | None = None,
  ) -> RenderedChat:
    """Returns the text of the conversation, as apply_chat_template of transformers writes it.

    Raises UserError if the template refuses the messages, fails, or uses up its budget
    (budget.BUDGET), which is far more than a conversation needs.

    Args:
      prompt: Whether the text ends where the assistant's answer begins.
      thinking: The value of enable_thinking and thinking; None: the template's default.
    """
    values: dict[str, Any] = dict(
      messages=[_with_reasoning(m) for m in messages], add_generation_prompt=prompt, tools=tools,
      documents=None,
    )  # fmt: skip
    if thinking is not None:
      values |= {'enable_thinking': thinking, 'thinking': thinking}
    template = self._templates[self._name(tools)]
    pieces = []
    with self._lock:
      self._budget.left = BUDGET
      try:
        for piece in template.generate(**self._tokens | values):
          self._budget.pay(len(piece))
          pieces.append(piece)
        text = ''.join(pieces)
        text.encode()  # fails if the text has half of a surrogate pair
      except Exception as e:  # a template is a program, which may fail in any way
        raise UserError(f'the chat template cannot write these messages: {_described(e)}') from None
    return _without_marks(text)

  def _name(self, tools: Sequence[Tool] | None) -> str:
    return 'tool_use' if tools and 'tool_use' in self._templates else 'default'

  def check_tools(self, chat: Conversation) -> None:
    """Raises UserError if the template leaves out a call, the result of a call, or a tool.

    Many templates do so without a word. It is found by writing the conversation once more, with a
    mark in place of each of these.
    """
    if not chat.has_tools:
      return
    marks: list[str] = []

    def mark(what: str) -> str:
      marks.append(what)
      return f'Mark{len(marks) - 1}ed'

    messages = [_marked(m, n, mark) for n, m in enumerate(chat.messages, 1)]
    tools = [
      {**tool, 'function': {**tool['function'], 'name': mark(f'the tool {name_of_tool(tool)}')}}
      for tool in chat.tools or ()
    ]
    text = self.render(messages, False, tools or None)
    for number, what in enumerate(marks):
      if f'Mark{number}ed' not in text:
        raise UserError(
          f'the chat template leaves out {what}: set CHAT_TEMPLATE=FILE to one that writes it, or '
          'leave the record out'
        )


def check_says_messages(text: str, messages: Sequence[Message]) -> None:
  """Raises UserError if a text that a template has written has none of the words of the messages.

  The last thousand words are looked at.
  """
  contents = (str(m.get('content') or '') for m in reversed(messages))
  words = itertools.islice((w.group() for c in contents for w in _WORD.finditer(c)), _MOST_WORDS)
  has_words = False
  for word in words:
    if word in text:
      return
    has_words = True
  if has_words:
    raise UserError(
      'the chat template writes none of the messages: it is not a chat template, or does not '
      'support these roles'
    )


def _with_reasoning(message: Message) -> Message:
  """Returns a message with its reasoning under each name that templates know."""
  found = reasoning_of(message)
  if found is None:
    return message
  return {'thinking': found, **message, 'reasoning_content': found}


def _without_marks(text: str) -> RenderedChat:
  """Takes the marks of {% generation %} out of a text; returns it with what was between them."""
  if GENERATION[0][0] not in text:
    return RenderedChat(text, [])
  pieces: list[str] = []
  open_at: list[int] = []
  spans = []
  place = length = 0
  for mark in _MARKS.finditer(text):
    pieces.append(text[place : mark.start()])
    length += mark.start() - place
    place = mark.end()
    if mark.group() == GENERATION[0]:
      open_at.append(length)
    elif open_at:
      spans.append((open_at.pop(), length))
  return RenderedChat(''.join([*pieces, text[place:]]), sorted(spans))


def _marked(message: Message, number: int, mark: Callable[[str], str]) -> Message:
  """Returns a message with marked names of calls and marked texts next to or from tools."""
  if message['role'] == 'tool':
    return {**message, 'content': mark(f'the result of a tool (message {number})')}
  if 'tool_calls' not in message:
    return message
  calls = [
    {
      **call,
      'function': {**call['function'], 'name': mark(f'the call of {name} (message {number})')},
    }
    for call in message['tool_calls']
    for name in [call['function']['name']]
  ]
  content = message['content']
  if content.strip():
    content = mark(f'the text next to a tool call (message {number})')
  return {**message, 'content': content, 'tool_calls': calls}


def _described(e: Exception) -> str:
  """Describes an exception of a template.

  A built-in exception of Python is described with its class, because it often has no message.
  """
  kind = type(e)
  if kind.__module__ != 'builtins':
    return str(e)
  return f'{kind.__name__}: {e}' if str(e) else kind.__name__


def _chat_templates(tokenizer_path: str) -> dict[str, str]:
  """Returns the templates that come with a tokenizer, by name; one of them is `default`."""
  beside = pathlib.Path(tokenizer_path).parent / CHAT_TEMPLATE
  if beside.is_file():
    for_tools = beside.parent / TOOL_TEMPLATE
    more = {'tool_use': read_text(str(for_tools))} if for_tools.is_file() else {}
    return {'default': read_text(str(beside))} | more
  template = configuration(tokenizer_path).get('chat_template')
  where = f'chat_template in {pathlib.Path(tokenizer_path).parent / CONFIGURATION}'
  if isinstance(template, list):  # several templates, each with a name
    good = all(
      isinstance(t, dict) and isinstance(t.get('name'), str) and isinstance(t.get('template'), str)
      for t in template
    )
    if not good:
      raise UserError(f'{where} must be a string, or a list of {{"name": text, "template": text}}')
    template = {t['name']: t['template'] for t in template}
  if isinstance(template, dict):
    if not isinstance(template.get('default'), str):
      names = ', '.join(map(str, template)) or 'none'
      raise UserError(
        f'{where} has no template named default (its names: {names}): choose one and set '
        'CHAT_TEMPLATE to its text'
      )
    return {k: v for k, v in template.items() if k in ('default', 'tool_use')}
  if not isinstance(template, str):
    place = schemes.shown(pathlib.Path(tokenizer_path))
    raise NoTemplate(
      f'{place} has no chat template: neither chat_template.jinja nor chat_template in '
      f'{CONFIGURATION} is next to it'
    )
  return {'default': template}
