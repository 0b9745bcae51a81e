"""Converts tokens one by one to the text that each adds.

A tokenizer decodes whole texts. Those of SentencePiece's kind drop the first space of a text, and a
character may be several tokens. So the text of a token is what it adds: decode(before + token)
without decode(before). The bytes of a part of a character come from the vocabulary, and the text is
the UTF-8 of all bytes. A character belongs to the token that completes it. Bytes that are not UTF-8
become U+FFFD, one for each longest beginning of a character, as in Python's 'replace'.
"""

import codecs
import functools
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from paxlite.data.byte_tokens import bytes_of
from paxlite.data.tokenizer import Tokenizer

_UNKNOWN = '\ufffd'
_BYTE = re.compile('<0x([0-9A-F]{2})>')
_MOST_PENDING = 8  # of the last tokens before a text, those that may begin its first character
_SEARCHED = 1 << 12  # ids among which an anchor is


class Mark(str):
  """The name of a special token among the parts of a text, to which it adds nothing."""

  __slots__ = ()


class SpelledToken(NamedTuple):
  """The text that a token adds."""

  text: str  # the characters that it completes; the name of a special token
  data: bytes | None  # its bytes; None: it is a special token


class Spelling:
  """Spells the tokens of one sequence, one after another.

  Args:
    before: The tokens before the first one that is spelled.
  """

  def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()):
    self._tokenizer = tokenizer
    self._known: dict[int, bytes | Mark] = {}
    self._utf8 = codecs.getincrementaldecoder('utf-8')('replace')
    self._has_begun = False
    if any(not isinstance(self._added(token), Mark) for token in reversed(before)):
      self._begin()
    for token in before[-_MOST_PENDING:]:
      self.add(token)

  def add(self, token: int) -> SpelledToken:
    """Returns what the next token adds."""
    added = self._added(token)
    if isinstance(added, Mark):
      return SpelledToken(added, None)
    if not self._has_begun:
      self._begin()
    return SpelledToken(self._utf8.decode(added), added)

  def peek(self, token: int) -> SpelledToken:
    """Returns what a token would add in the place of the next one."""
    added = self._added(token)
    if isinstance(added, Mark):
      return SpelledToken(added, None)
    state = self._utf8.getstate()
    text = self._utf8.decode(added)
    self._utf8.setstate(state)
    return SpelledToken(text, added)

  def rest(self) -> str:
    """Returns U+FFFD if the sequence ends within a character, otherwise ''."""
    return self._utf8.decode(b'', True)

  def _begin(self) -> None:
    self._has_begun = True
    self._known.clear()

  def _added(self, token: int) -> bytes | Mark:
    if token not in self._known:
      self._known[token] = self._looked_up(token)
    return self._known[token]

  def _looked_up(self, token: int) -> bytes | Mark:
    """Returns the bytes that a token adds, or the name of a special token."""
    before: Sequence[int] = ()
    length = 0
    if self._has_begun:
      before, length = _anchor(self._tokenizer)  # type: ignore[arg-type]  # by its identity
    text = self._tokenizer.decode([*before, token])[length:]
    if _UNKNOWN in text:
      return _bytes_of(self._tokenizer.piece(token))
    name = '' if text else self._tokenizer.decode_marked([token])
    return Mark(name) if name else text.encode()


def spelled(
  tokenizer: Tokenizer,
  ids: Sequence[int],
  before: Sequence[int] = (),
  others: Sequence[Iterable[int]] = (),
) -> list[tuple[SpelledToken, list[SpelledToken]]]:
  """Returns what each token of a sequence adds, and what others would add in its place.

  The texts of the pieces without special tokens are the text of the sequence. Where it ends within
  a character, its last token adds U+FFFD.

  Args:
    ids: The tokens.
    before: The tokens before them.
    others: Other tokens for each of the first places.
  """
  spelling = Spelling(tokenizer, before)
  found: list[tuple[SpelledToken, list[SpelledToken]]] = []
  for i, token in enumerate(ids):
    instead = [spelling.peek(other) for other in (others[i] if i < len(others) else ())]
    found.append((spelling.add(token), instead))
  if rest := spelling.rest():
    last = max((i for i, (piece, _) in enumerate(found) if piece.data is not None), default=None)
    if last is not None:
      piece, instead = found[last]
      found[last] = SpelledToken(piece.text + rest, piece.data), instead
  return found


def added_text(tokenizer: Tokenizer, ids: Sequence[int], before: Sequence[int] = ()) -> str:
  """Returns the text that tokens add to the tokens before them."""
  return ''.join(
    piece.text for piece, _ in spelled(tokenizer, ids, before) if piece.data is not None
  )


def shown(parts: Iterable[str]) -> str:
  """Returns the text of parts of a text, without the names of special tokens."""
  return ''.join(part for part in parts if not isinstance(part, Mark))


def between(parts: Iterable[str], start: int, end: int) -> list[str]:
  """Returns the parts between two places of the joined parts; a Mark that is cut is left out."""
  found, at = [], 0
  for part in parts:
    first, last = max(start - at, 0), min(end - at, len(part))
    is_whole = (first, last) == (0, len(part))
    if first < last and (is_whole or not isinstance(part, Mark)):
      found.append(part if is_whole else part[first:last])
    at += len(part)
  return found


@functools.lru_cache(maxsize=16)
def _anchor(tokenizer: Tokenizer) -> tuple[tuple[int, ...], int]:
  """Returns a token behind which others have their own text, and the length of its text.

  It is a letter or a digit. Tokens of a tokenizer that has none are decoded alone.
  """
  for token in range(_SEARCHED):
    text = tokenizer.decode([token])
    if text.isascii() and text.strip().isalnum():
      return (token,), len(text)
  return (), 0


def _bytes_of(piece: str) -> bytes:
  """Returns the bytes of a token of the vocabulary that is not whole characters."""
  found = _BYTE.fullmatch(piece)
  return bytes([int(found[1], 16)]) if found else bytes_of(piece)
