"""Tokens of a text, with their offsets in the text."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Tokens(NamedTuple):
  """The tokens of a text."""

  ids: np.ndarray  # token ids, int32 [n]
  # The character that each token begins at [n]. Several tokens may share one character.
  starts: np.ndarray
  # the character after each token [n]; where it equals the start, a token has no character
  ends: np.ndarray

  def within(self, spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """Returns whether each token [n] has a part in one of the spans (start, end) of characters."""
    found = np.zeros(len(self.ids), bool)
    for start, end in spans:
      is_empty = (self.ends == self.starts) & (self.starts >= start)
      found |= (self.starts < end) & ((self.ends > start) | is_empty)
    return found

  def after(self, place: int) -> 'Tokens':
    """Returns the tokens that begin at a character or behind it."""
    here = self.starts >= place
    return Tokens(self.ids[here], self.starts[here], self.ends[here])
