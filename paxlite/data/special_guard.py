"""Encodes texts of which some parts are ordinary text, even if they spell out special tokens."""

import json
import re
import secrets
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

from paxlite.core.json_text import JsonObject

Span = tuple[int, int]
Spans = Sequence[Span]

_PRIVATE = 0x100000  # the first of 65,534 characters without a meaning


class SpecialGuard:
  """A tokenizer.json that finds special tokens only where it is told to.

  The package finds special tokens everywhere or nowhere. Here it finds none, and each special
  token has another name, as long as its own, which is drawn at random.

  Args:
    pipeline: The contents of the tokenizer.json.
    texts: The texts of the added tokens that count as special.
  """

  def __init__(self, pipeline: JsonObject, texts: Collection[str]):
    import tokenizers

    tokens = [t | {'special': t['content'] in texts} for t in pipeline['added_tokens']]
    self._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(pipeline | {'added_tokens': tokens}))
    added = self._tokenizer.get_added_tokens_decoder()
    special = {token.content: (i, token) for i, token in added.items() if token.special}
    self._tokenizer.encode_special_tokens = True
    drawn = lambda text: ''.join(chr(_PRIVATE + secrets.randbelow(65534)) for _ in text)
    self._names = {text: drawn(text) for text in special}
    for text, (_, token) in special.items():
      flags = {k: getattr(token, k) for k in ('lstrip', 'rstrip', 'single_word')}
      self._tokenizer.add_tokens(
        [tokenizers.AddedToken(self._names[text], special=False, normalized=False, **flags)]
      )
    self._ids = {
      self._tokenizer.token_to_id(self._names[text]): i for text, (i, _) in special.items()
    }
    longest_first = sorted(special, key=len, reverse=True)
    self._pattern = re.compile('|'.join(map(re.escape, longest_first)) or '(?!)')

  def is_forged(self, text: str, plain: Spans, ids: Sequence[int], offsets: Spans) -> bool:
    """Returns whether ids of a text have special tokens other than those outside of `plain`.

    Args:
      plain: First and last + 1 character of the parts in which there are no special tokens.
      ids: The ids that the tokenizer gives the text.
      offsets: Their places in the text.
    """
    special = {*self._ids.values()}
    found = [span for i, span in zip(ids, offsets, strict=True) if i in special]
    true = [match.span() for match in self._true(text, plain)]
    # a token may have blanks around its text
    starts = np.array([start for start, _ in true], int)
    return any(
      not any(a <= start and stop <= b for start, stop in true[np.searchsorted(starts, a) :][:1])
      for a, b in found
    )

  def encoded(self, text: str, plain: Spans) -> list[int]:
    """Returns the ids of a text in which there are no special tokens in the parts `plain`."""
    pieces, place = [], 0
    for match in self._true(text, plain):
      pieces += [text[place : match.start()], self._names[match.group()]]
      place = match.end()
    named = ''.join([*pieces, text[place:]])
    encoding: Any = self._tokenizer.encode(named, add_special_tokens=False)
    return [self._ids.get(i, i) for i in encoding.ids]

  def _true(self, text: str, plain: Spans) -> Iterator[re.Match[str]]:
    """Yields the places of special tokens that have no character in the parts `plain`."""
    is_plain = np.zeros(len(text), bool)
    for start, stop in plain:
      is_plain[start:stop] = True
    for match in self._pattern.finditer(text):
      if not is_plain[match.start() : match.end()].any():
        yield match
