"""The one place where documents become token ids.

Training, prompts, evaluation and the tools use it, so that a text has one tokenization. Each text
is encoded once, as a whole, because the tokens on both sides of a cut can depend on each other.
"""

import functools
import zlib
from collections.abc import Sequence

import numpy as np

from paxlite.core.errors import UserError
from paxlite.data.tokenizer import Tokenizer, check_ids


class DocumentEncoding:
  """Encodes texts for a model.

  Args:
    vocab_size: Number of ids of the model; None: that of the tokenizer.
    start_id: The id that every text begins with; None: what the tokenizer puts there.
    eos_ids: The ids that end a text; empty: the tokenizer's EOS, if it has one.
  """

  def __init__(
    self,
    tokenizer: Tokenizer,
    vocab_size: int | None = None,
    start_id: int | None = None,
    eos_ids: Sequence[int] = (),
  ):
    self.tokenizer = tokenizer
    self._vocab_size = vocab_size or tokenizer.vocab_size
    self._start_id, self._eos_ids = start_id, tuple(eos_ids)
    self.num_tokens = self.num_unknown = 0

  @property
  def start_ids(self) -> list[int]:
    """The ids that a text begins with."""
    return self.tokenizer.start_ids if self._start_id is None else [self._start_id]

  @property
  def first_id(self) -> int:
    """The id that stands before the first token of a document.

    Raises UserError if the tokenizer begins texts with none, and has neither BOS nor EOS.
    """
    found = self.start_ids[-1] if self.start_ids else self.stand_in
    if found is None:
      raise UserError(
        f'the tokenizer {self.tokenizer.path} has neither BOS nor EOS to precede the first token '
        'of a document: set START_ID=ID'
      )
    return found

  @property
  def stand_in(self) -> int | None:
    """The id that stands for an empty text: BOS, or else EOS; None: there is neither."""
    named = (self.tokenizer.special_id(name) for name in ('bos_token', 'eos_token'))
    return next((i for i in (*named, *self.end_ids) if i is not None), None)

  @property
  def eos_ids(self) -> list[int]:
    """The ids that end a text; any one of them ends it."""
    own = self.tokenizer.eos_id
    return list(self._eos_ids) or ([] if own is None else [own])

  @property
  def end_ids(self) -> list[int]:
    """The id that is written after a text that is learned; [] if nothing ends a text."""
    own = self.tokenizer.eos_id
    return [own] if own is not None and own in self.eos_ids else self.eos_ids[:1]

  @property
  def warnings(self) -> list[str]:
    """Warnings before a model learns documents, a line each."""
    unknown = [self.unknown] if self.unknown else []
    if self.end_ids:
      return unknown
    return [
      *unknown,
      'The tokenizer has no EOS, so documents have no end and the model does not learn to stop. '
      "Set 'EOS_IDS=[ID]', or use a tokenizer with an eos_token",
    ]

  @property
  def unknown(self) -> str:
    """Describes how much of the text the tokenizer does not know; '' if it knows all."""
    return unknown_tokens(self.num_unknown, self.num_tokens) if self.num_unknown else ''

  @functools.cached_property
  def fingerprint(self) -> int:
    """A checksum of the tokenizer and of what begins and ends a document."""
    starts: list[int | None] = [*self.start_ids] or [self.stand_in]
    return zlib.crc32(repr((self.tokenizer.fingerprint, starts, self.end_ids)).encode())

  def text(self, text: str) -> list[int]:
    """Returns the ids of a text without those that begin and end it."""
    ids = self.tokenizer.encode(text)
    self._check(np.asarray(ids, np.int64))
    return ids

  def prompt(self, text: str) -> list[int]:
    """Returns the ids of a text that the model continues."""
    return self.start_ids + self.text(text)

  def document(self, text: str, ends: bool = True) -> np.ndarray:
    """Returns the ids [n] of a document, without the ids that it begins with.

    Args:
      ends: Whether the document ends with the text, so that what ends it is there.
    """
    ids = self.tokenizer.encode_array(text)
    self._check(ids)
    return np.concatenate([ids, np.array(self.end_ids if ends else [], ids.dtype)])

  def _check(self, ids: np.ndarray) -> None:
    check_ids(self.tokenizer, ids, self._vocab_size)
    self.num_tokens += len(ids)
    if self.tokenizer.unk_id is not None:
      self.num_unknown += int((ids == self.tokenizer.unk_id).sum())


def unknown_tokens(count: int, total: int) -> str:
  """Returns a warning with the number of unknown tokens."""
  return (
    f'{count:,} of {total:,} tokens are unknown: the tokenizer lacks characters of the text, so '
    'the model cannot learn them. Use a tokenizer with byte fallback, or one for this language'
  )
