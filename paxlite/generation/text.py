"""The text of an answer while it is generated, and the texts that end it."""

import functools
from collections.abc import Sequence

from paxlite.data.tokenizer import Tokenizer


class AnswerText:
  """The text of the tokens of one answer.

  As in EleutherAI's harness, a token ends the answer too if it is spelled out in one of the texts,
  as <|im_end|>. An answer ends with the first token with which such a text stands in its last few
  tokens.

  Args:
    tokenizer: The tokenizer.
    stop: The texts that end the answer.
  """

  def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()):
    self._tokenizer = tokenizer
    self._stop = [text for text in stop if text]
    self._ids: list[int] = []
    self._shown = ''
    self.is_ended = False

  def add(self, token: int) -> None:
    """Appends a token."""
    self._ids.append(token)
    for ending, width in self._widths:
      if ending in self._tokenizer.decode_marked(self._ids[-width:]):
        self.is_ended = True

  @functools.cached_property
  def _widths(self) -> list[tuple[str, int]]:
    """In how many of the last tokens each ending can stand: one for each byte, and a space."""
    return [(ending, len(ending.encode()) + 2) for ending in self._stop]

  @property
  def text(self) -> str:
    """The text, up to the first of the texts that end it."""
    text = self._tokenizer.decode(self._ids)
    for ending in self._stop:
      text = text.split(ending)[0]
    return text

  def piece(self, is_last: bool = False) -> str:
    """Returns the text since the last call that later tokens cannot change.

    A character of several tokens comes with its last token. What may be the beginning of a text
    that ends the answer waits for the tokens after it.

    Args:
      is_last: Whether no token follows.
    """
    text = self.text
    if not is_last:
      if text.endswith('\ufffd'):
        return ''
      text = text[: len(text) - self._held(text)]
    new = text[len(self._shown) :]
    if new:
      self._shown = text
    return new

  def _held(self, text: str) -> int:
    """Returns how many characters at the end may be the beginning of an ending."""
    longest = max(map(len, self._stop), default=1) - 1
    for count in range(min(longest, len(text)), 0, -1):
      if any(ending.startswith(text[-count:]) for ending in self._stop):
        return count
    return 0
