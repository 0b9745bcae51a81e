"""Encodes texts of which some parts are ordinary text, even if they spell out special tokens."""

import json
import re
import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np

from paxlite.core.json_text import JsonObject

_PRIVATE = 0x100000  # the first of 65,534 characters without a meaning


class SpecialGuard:
  """A tokenizer.json that finds special tokens only where it is told to.

  The package finds special tokens everywhere or nowhere. Here it finds none, and each special
  token has another name, as long as its own, which is drawn at random.

  Args:
    pipeline: The contents of the tokenizer.json.
  """

  def __init__(self, pipeline: JsonObject):
    import tokenizers

    self._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(pipeline))
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

  def encoded(
    self, text: str, plain: Sequence[tuple[int, int]]
  ) -> tuple[list[int], list[tuple[int, int]]]:
    """Returns the ids of a text and their offsets in it.

    Args:
      text: The text.
      plain: First and last + 1 character of the parts in which there are no special tokens.
    """
    is_plain = np.zeros(len(text), bool)
    for start, stop in plain:
      is_plain[start:stop] = True
    named = lambda found: (
      found.group() if is_plain[found.start() : found.end()].any() else self._names[found.group()]
    )
    encoding: Any = self._tokenizer.encode(self._pattern.sub(named, text), add_special_tokens=False)
    return [self._ids.get(i, i) for i in encoding.ids], encoding.offsets
