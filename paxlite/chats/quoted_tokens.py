"""Special tokens that stand in the texts of others, and are ordinary text there.

A chat template writes special tokens around messages, and a message may hold the same characters.
While the template writes, other characters, which nobody can guess, stand for those that special
tokens begin and end with, wherever a message has them; afterwards their places are known to be
text. So a special token is also known that only the template joins from pieces of a message.
"""

import json
import re
import secrets
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from paxlite.chats.conversations import Message

T = TypeVar('T')
Span = tuple[int, int]

# Models write these in their answers, and templates look for them there.
_OF_ANSWERS = re.compile(r'</?(?:think|thinking|tool_calls?)>')
_PRIVATE = range(0xF0000, 0xFFFFE)  # characters without a meaning, other than those of SpecialGuard


class QuotedTokens:
  """The special tokens in the messages of one conversation.

  Args:
    texts: The texts of all special tokens. Those that neither begin nor end with a sign, such as
      `<`, are found as a whole.
  """

  def __init__(self, texts: Collection[str]):
    signs = {c for text in texts for c in (text[:1], text[-1:]) if _is_sign(c)}
    words = [text for text in texts if text and not signs.intersection((text[0], text[-1]))]
    self._anywhere = _any_of([*signs, *words])
    self._in_answers = re.compile(f'{_OF_ANSWERS.pattern}|{self._anywhere.pattern}')
    quoted = sorted(signs.union(*words))
    drawn = map(chr, secrets.SystemRandom().sample(_PRIVATE, len(quoted)))
    self._quotes = dict(zip(quoted, drawn, strict=True))

  def message(self, message: Message) -> Message:
    """Returns a message in which other characters stand for those of special tokens."""
    is_answer = message.get('role') == 'assistant'
    return self._replaced(message, self._in_answers if is_answer else self._anywhere)

  def tools(self, tools: T) -> T:
    """Returns descriptions of tools in which other characters stand for those of special tokens."""
    found: T = self._replaced(tools, self._anywhere)
    return found

  def restored(self, text: str) -> tuple[str, list[Span]]:
    """Returns what a template has written with its own characters, and the places of these."""
    for quote in self._quotes.values():  # where the template writes JSON in ASCII
      text = text.replace(json.dumps(quote)[1:-1], quote)
    spans = [found.span() for found in _any_of(self._quotes.values()).finditer(text)]
    return text.translate({ord(quote): c for c, quote in self._quotes.items()}), spans

  def _replaced(self, value: Any, pattern: re.Pattern[str]) -> Any:
    if isinstance(value, str):
      return pattern.sub(self._quote, value)
    if isinstance(value, list | tuple):
      return [self._replaced(x, pattern) for x in value]
    if isinstance(value, Mapping):
      new = lambda x: self._replaced(x, pattern)
      return {new(k): new(x) for k, x in value.items()}
    return value

  def _quote(self, found: re.Match[str]) -> str:
    if _OF_ANSWERS.fullmatch(found.group()):
      return found.group()
    return ''.join(self._quotes[c] for c in found.group())


def _is_sign(character: str) -> bool:
  return bool(character) and not character.isalnum() and not character.isspace()


def _any_of(texts: Collection[str]) -> re.Pattern[str]:
  longest_first = sorted(filter(None, texts), key=len, reverse=True)
  return re.compile('|'.join(map(re.escape, longest_first)) or '(?!)')
