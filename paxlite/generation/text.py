"""The text of an answer during generation, and its stop texts."""

import functools
from collections.abc import Sequence

from paxlite.data.tokenizer import Tokenizer
from paxlite.generation.spelling import Spelling, between, shown


class AnswerText:
  """The parts of one answer: texts, and Marks, which are the names of special tokens.

  As in EleutherAI's harness, a special token ends the answer too if it is spelled out in one of the
  texts, as <|im_end|>. An answer ends with the token that completes such a text.

  Args:
    stop: The texts that end the answer.
    before: The tokens that the answer continues.
    least: Texts that the first so many tokens complete do not end it.
  """

  def __init__(
    self, tokenizer: Tokenizer, stop: Sequence[str] = (), before: Sequence[int] = (), least: int = 0
  ):
    self._tokenizer, self._before, self._least = tokenizer, before, least
    self._stop = [text for text in stop if text]
    self._count = 0  # of tokens
    self._parts: list[str] = []
    self._waiting: list[str] = []  # parts that nobody has got
    self._joined = ''
    self._sent = 0  # how much of it was got
    self._end: int | None = None  # where a text that ends the answer begins

  @functools.cached_property
  def _spelling(self) -> Spelling:
    return Spelling(self._tokenizer, self._before)

  @property
  def is_ended(self) -> bool:
    """Whether a text has ended the answer."""
    return self._end is not None

  def add(self, token: int) -> None:
    """Appends a token."""
    before = len(self._joined)
    self._append(self._spelling.add(token).text)
    self._count += 1
    if self._stop and self._count > self._least and self._end is None:
      place = lambda ending: self._joined.find(ending, max(0, before - len(ending) + 1))
      self._end = min((at for at in map(place, self._stop) if at >= 0), default=None)

  def close(self) -> None:
    """Notes that no token follows."""
    self._append(self._spelling.rest())

  @property
  def parts(self) -> list[str]:
    """All parts, up to the first of the texts that end the answer."""
    return between(self._parts, 0, len(self._joined) if self._end is None else self._end)

  @property
  def text(self) -> str:
    """Their text, without special tokens."""
    return shown(self.parts)

  def news(self, is_last: bool = False) -> list[str]:
    """Returns the parts since the last call that later tokens cannot change.

    A character of several tokens comes with its last token. What may be the beginning of a text
    that ends the answer waits for the tokens after it.

    Args:
      is_last: Whether no token follows.
    """
    end = self._end
    if end is None:
      end = len(self._joined) - (0 if is_last else self._held())
    found = between(self._waiting, 0, end - self._sent)
    length = sum(map(len, found))
    self._waiting = between(self._waiting, length, len(self._joined))
    self._sent += length
    return found

  def _append(self, part: str) -> None:
    if part:
      self._parts.append(part)
      self._waiting.append(part)
      self._joined += part

  def _held(self) -> int:
    """Returns how many characters at the end may be the beginning of an ending."""
    longest = max(map(len, self._stop), default=1) - 1
    for count in range(min(longest, len(self._joined)), 0, -1):
      if any(ending.startswith(self._joined[-count:]) for ending in self._stop):
        return count
    return 0
