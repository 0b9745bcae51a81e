"""Special tokens that stand in the texts of others, and are ordinary text there.

A chat template writes special tokens around messages, and a message may hold the same characters.
While the template writes, a number that nobody can guess stands for each special token in a
message; afterwards the places of these numbers are known to be text.
"""

import re
import secrets
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from paxlite.data.conversations import Message

T = TypeVar('T')
Span = tuple[int, int]

# Models write these in their answers, and templates look for them there.
_OF_ANSWERS = re.compile(r'</?(?:think|thinking|tool_calls?)>')


class QuotedTokens:
  """The special tokens in the messages of one conversation.

  Args:
    texts: The texts of all special tokens.
  """

  def __init__(self, texts: Collection[str]):
    self._anywhere = _any_of(texts)
    self._in_answers = _any_of([text for text in texts if not _OF_ANSWERS.fullmatch(text)])
    self._nonce = f'{secrets.randbelow(10**24):024}'
    self._found: list[str] = []

  def message(self, message: Message) -> Message:
    """Returns a message with numbers in the place of special tokens."""
    is_answer = message.get('role') == 'assistant'
    return self._replaced(message, self._in_answers if is_answer else self._anywhere)

  def tools(self, tools: T) -> T:
    """Returns descriptions of tools with numbers in the place of special tokens."""
    found: T = self._replaced(tools, self._anywhere)
    return found

  def restored(self, text: str) -> tuple[str, list[Span]]:
    """Returns what a template has written with the tokens in their places, and these places."""
    pieces: list[str] = []
    spans = []
    length = 0
    for i, piece in enumerate(re.split(rf'{self._nonce}(\d{{8}})', text)):
      if i % 2:
        piece = self._found[int(piece)]
        spans.append((length, length + len(piece)))
      pieces.append(piece)
      length += len(piece)
    return ''.join(pieces), spans

  def _replaced(self, value: Any, pattern: re.Pattern[str]) -> Any:
    if isinstance(value, str):
      return pattern.sub(self._number, value)
    if isinstance(value, list | tuple):
      return [self._replaced(x, pattern) for x in value]
    if isinstance(value, Mapping):
      new = lambda x: self._replaced(x, pattern)
      return {new(k): new(x) for k, x in value.items()}
    return value

  def _number(self, found: re.Match[str]) -> str:
    self._found.append(found.group())
    return f'{self._nonce}{len(self._found) - 1:08}'


def _any_of(texts: Collection[str]) -> re.Pattern[str]:
  longest_first = sorted(filter(None, texts), key=len, reverse=True)
  return re.compile('|'.join(map(re.escape, longest_first)) or '(?!)')
