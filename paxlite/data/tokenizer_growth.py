"""Bounds how much longer a tokenizer.json may make a text before it is split into tokens.

Steps of a normalizer that each double a letter make a text of one character one of gigabytes.
"""

import base64
import itertools
import math
from typing import Protocol

from paxlite.core.errors import UserError
from paxlite.core.json_text import Json, parsed

_MOST = 100  # times that a text may become longer; those of published tokenizers are below 10
_MOST_ADDED = 10_000  # characters that may be put before each text or word


class TokenizerStep(Protocol):
  """A normalizer, pre-tokenizer or decoder of the library tokenizers."""

  def __getstate__(self) -> bytes: ...


def check_growth(path: str, name: str, step: TokenizerStep | None) -> None:
  """Raises UserError if a part of a tokenizer makes texts much longer.

  Args:
    path: The tokenizer, for the message.
    name: What the part is.
    step: The part; None if the tokenizer has none.
  """
  if step is None:
    return
  times, added = 1.0, 0
  for each in _steps(parsed(step.__getstate__())):
    factor, more = _growth(each)
    times = min(times * factor, math.inf)
    added = added + more
    if times > _MOST or added > _MOST_ADDED:
      raise UserError(
        f'the {name} of the tokenizer {path} can make a text more than {_MOST} times as long: no '
        'published tokenizer does so; take the one that belongs to the model'
      )


def _steps(state: Json) -> list[dict]:
  """Returns the steps of a sequence, and of sequences in it, in their order."""
  if not isinstance(state, dict):
    return []
  for name in ('normalizers', 'pretokenizers', 'decoders'):
    if isinstance(state.get(name), list):
      return list(itertools.chain.from_iterable(map(_steps, state[name])))
  return [state]


def _growth(step: dict) -> tuple[float, int]:
  """Returns how many times longer a step makes a text, and how many characters it adds."""
  match step.get('type'):
    case 'Replace':
      content, pattern = str(step.get('content', '')), step.get('pattern')
      literal = pattern.get('String') if isinstance(pattern, dict) else None
      if literal:
        return max(1.0, len(content) / len(literal)), 0
      return 1.0 + len(content), 0  # a regular expression may match between all characters
    case 'Prepend':
      return 1.0, len(str(step.get('prepend', '')))
    case 'Precompiled':
      return float(_longest(step.get('precompiled_charsmap'))), 0
    case _:
      return 1.0, 0  # The library's own rules expand few characters, and not again and again.


def _longest(charsmap: Json) -> int:
  """Returns the characters of the longest text that a map of SentencePiece puts for others."""
  content = base64.b64decode(charsmap or '')
  texts = content[4 + int.from_bytes(content[:4], 'little') :]
  return max((len(t.decode('utf-8', 'replace')) for t in texts.split(b'\0')), default=1) or 1
