"""Grammars of the allowed next tokens, by the package llguidance (the extra serve)."""

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paxlite.core import shell
from paxlite.core.errors import UserError, line_of
from paxlite.core.json_text import Json
from paxlite.data.json_tokenizer import JsonTokenizer
from paxlite.data.tokenizer import Tokenizer
from paxlite.generation.spelling import Spelling


class GrammarError(UserError):
  """A grammar gave up within an answer, or let a token come that does not fit."""


class Grammars:
  """Makes the grammars of answers.

  Raises UserError if the package is missing, or no token ends an answer.

  Args:
    vocab_size: The number of ids of the model.
    ends: Token ids that end an answer; the first one is what a complete text may be followed by.
  """

  def __init__(self, tokenizer: Tokenizer, vocab_size: int, ends: Sequence[int]):
    try:
      import llguidance
    except ImportError as e:
      raise UserError(f'a grammar needs llguidance ({e}): {shell.install("serve")}') from None
    if not ends:
      raise UserError('a grammar needs a model with stop tokens')
    self._library = llguidance
    size = max(vocab_size, tokenizer.vocab_size)
    try:
      self._tokenizer = llguidance.LLTokenizer(_described(tokenizer), size, [*ends])
    except Exception as e:  # the package knows some kinds of tokenizers, and raises several types
      raise UserError(f'grammars are not supported with this tokenizer: {line_of(e)}') from None

  def json(self, schema: Mapping[str, Json] | None = None) -> 'MatchedGrammar':
    """Returns the grammar of a JSON value that fits a schema; None: of any object."""
    schema = {'type': 'object'} if schema is None else schema
    return self._made(self._library.LLMatcher.grammar_from_json_schema(json.dumps(schema)))

  def regex(self, pattern: str) -> 'MatchedGrammar':
    """Returns the grammar of a regular expression."""
    return self._made(self._library.LLMatcher.grammar_from_regex(pattern))

  def lark(self, text: str) -> 'MatchedGrammar':
    """Returns a grammar in Lark's form."""
    return self._made(text)

  def _made(self, grammar: str) -> 'MatchedGrammar':
    matcher = self._library.LLMatcher(self._tokenizer, grammar, log_level=0)
    if matcher.is_error():
      raise UserError(f'the grammar cannot be used: {str(matcher.get_error()).splitlines()[0]}')
    return MatchedGrammar(matcher)


class MatchedGrammar:
  """A Grammar of one answer, by a matcher of llguidance."""

  def __init__(self, matcher: Any):
    self._matcher = matcher

  def allowed(self) -> np.ndarray:
    """Returns which tokens may come next; raises UserError if the matcher has given up."""
    mask = self._matcher.compute_bitmask()
    self._check(True)
    return np.unpackbits(np.frombuffer(mask, np.uint8), bitorder='little').astype(bool)

  def accept(self, token: int) -> None:
    """Notes the next token; raises UserError if it does not fit, or the matcher has given up."""
    self._check(self._matcher.consume_token(token))

  def _check(self, fits: bool) -> None:
    # a matcher that has used up its budget is stopped, as one at the end of the text
    if self._matcher.is_error() or not fits:
      why = str(self._matcher.get_error() or 'no token fits').splitlines()[0]
      raise GrammarError(f'the grammar failed within the answer: {why}')

  @property
  def may_end(self) -> bool:
    return bool(self._matcher.is_accepting())

  @property
  def is_complete(self) -> bool:
    return bool(self._matcher.is_stopped())


def _described(tokenizer: Tokenizer) -> Any:
  """Returns what llguidance makes its tokenizer of: the text of a tokenizer.json, or tokens."""
  if isinstance(tokenizer, JsonTokenizer):
    return json.dumps(tokenizer.pipeline)  # the file may have changed
  import llguidance

  return llguidance.TokenizerWrapper(_Tokens(tokenizer))


class _Tokens:
  """The tokens of a SentencePiece model, as llguidance asks for them."""

  def __init__(self, tokenizer: Tokenizer):
    self._tokenizer = tokenizer
    self.eos_token_id, self.bos_token_id = tokenizer.eos_id, tokenizer.bos_id
    self.special_token_ids = sorted(tokenizer.special_ids)

  @functools.cached_property
  def tokens(self) -> list[bytes]:
    spelling = Spelling(self._tokenizer, self._tokenizer.encode('a'))
    special = self._tokenizer.special_ids
    added = lambda i: b'' if i in special else spelling.peek(i).data or b''
    return [added(i) for i in range(self._tokenizer.vocab_size)]

  def __call__(self, text: bytes | str) -> list[int]:
    return self._tokenizer.encode(text if isinstance(text, str) else text.decode())
