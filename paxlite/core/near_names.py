"""Finds the known names that a misspelled one may mean."""

import difflib
import re
from collections.abc import Iterable

_MOST = 3


def near_names(name: str, known: Iterable[str], cutoff: float = 0.8) -> list[str]:
  """Returns at most three of the known names that are near to `name`, the nearest first.

  Capitals and punctuation do not count: smollm135m is SmolLM135M.

  Args:
    name: What a user has written.
    known: The names that exist.
    cutoff: The least similarity, from 0 to 1.
  """
  by_letters: dict[str, list[str]] = {}
  for candidate in known:
    by_letters.setdefault(_letters(candidate), []).append(candidate)
  near = difflib.get_close_matches(_letters(name), by_letters, n=_MOST, cutoff=cutoff)
  return [candidate for letters in near for candidate in by_letters[letters]][:_MOST]


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.8, prefix: str = '') -> str:
  """Returns the question 'Did you mean A or B?', or '' if no known name is near.

  Args:
    name: What a user has written.
    known: The names that exist.
    cutoff: The least similarity, from 0 to 1.
    prefix: What is put before each of the names, such as '--'.
  """
  near = near_names(name, known, cutoff)
  return f'Did you mean {" or ".join(prefix + n for n in near)}?' if near else ''


def _letters(name: str) -> str:
  return re.sub(r'[^a-z0-9]', '', name.lower())
