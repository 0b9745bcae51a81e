"""A tokenizer.json whose ids the package fastokens finds, several times as fast as tokenizers.

It promises the same ids. Its regular expressions may know another version of Unicode, and it may
have faults. So it encodes only texts of characters that were compared, alone and next to others,
and every 64th text is compared as a whole. A text with other ids ends its use.
"""

import logging
import unicodedata
from collections.abc import Iterable
from typing import Any

import numpy as np

from paxlite.data.json_tokenizer import JsonTokenizer
from paxlite.data.tokenizer import Tokenizer

log = logging.getLogger('paxlite')

_EVERY = 64  # one of so many texts is compared, after the same number of first ones
# next to letters, digits, signs and spaces, which say how patterns of words class a character
_AMONG_OTHERS = "{0} a{0}b  {0}1{0}2.{0}.\n{0}\n{0}{0}A {0}  '{0}s\t{0}"


class OtherIds(Exception):
  """Raised where fastokens and tokenizers encode a text with different ids."""


class FastTokenizer(JsonTokenizer):
  """A JsonTokenizer of byte-level BPE that uses fastokens.

  Raises:
    ImportError: The package is not installed.
    ValueError: The tokenizer is of another kind.
    OtherIds: The package finds an added token in another way.
  """

  _fast: Any = None

  def __init__(self, path: str):
    import fastokens

    super().__init__(path)
    self._is_normalized = type(self._tokenizer.normalizer).__name__ == 'NFC'
    if self._byte_tokens is None or not (self._is_normalized or self._tokenizer.normalizer is None):
      raise ValueError(f'{path} is not a byte-level tokenizer')
    self._fast = fastokens.Tokenizer.from_json_str(self._tokenizer.to_str())
    self._alike: dict[str, bool] = {}  # by character
    self._count = 0
    for text in self.added_texts.values():
      self._compared(_AMONG_OTHERS.format(text))
    self._is_ascii_alike = self._are_alike(map(chr, range(128)))

  def encode_array(self, text: str) -> np.ndarray:
    if self._fast is None or not self._knows(text):
      return super().encode_array(text)
    self._count += 1
    is_sample = self._count <= _EVERY or self._count % _EVERY == 0
    return self._compared(text) if is_sample else self._fast_ids(text)

  def _fast_ids(self, text: str) -> np.ndarray:
    return np.frombuffer(self._fast.encode_batch_flat([text])[0], np.uint32)

  def _compared(self, text: str) -> np.ndarray:
    ids = super().encode_array(text)
    if not np.array_equal(ids, self._fast_ids(text)):
      raise OtherIds(f'fastokens encodes {text[:60]!r} … with other ids than tokenizers')
    return ids

  def _knows(self, text: str) -> bool:
    """Returns whether the characters of a text are known alike, and none is normalized."""
    if text.isascii() and self._is_ascii_alike:
      return True
    is_normal = not self._is_normalized or unicodedata.is_normalized('NFC', text)
    return is_normal and self._are_alike(set(text))

  def _are_alike(self, characters: Iterable[str]) -> bool:
    found = True
    for character in characters:
      if character not in self._alike:
        try:
          self._compared(_AMONG_OTHERS.format(character))
          self._alike[character] = True
        except OtherIds:
          self._alike[character] = False
      found &= self._alike[character]
    return found


def is_faster(tokenizer: Tokenizer) -> bool:
  """Returns whether a FastTokenizer can replace a tokenizer; says so where their ids differ."""
  if type(tokenizer) is not JsonTokenizer:
    return False
  try:
    FastTokenizer(tokenizer.path)
  except (ImportError, ValueError):
    return False
  except OtherIds as e:
    log.warning('%s, and is not used', e)
    return False
  return True
