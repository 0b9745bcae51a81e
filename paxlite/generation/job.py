"""The progress of one request: its cache row, the prompt read so far, and its output."""

import enum
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from paxlite.data.tokenizer import Tokenizer
from paxlite.generation.request import Completion, Finish, Request, TokenScore
from paxlite.generation.spelling import shown
from paxlite.generation.text import AnswerText

_AHEAD = 256  # tokens of an answer that there is room for before they are written


class Phase(enum.Enum):
  """The stage of a job."""

  WAITING = 'it has no row'
  READING = 'its prompt is being read'
  WRITING = 'its answer is being generated'
  DONE = 'it has an answer'


class PromptPart(NamedTuple):
  """A part of a prompt."""

  ids: Sequence[int]  # its tokens
  places: Sequence[int]  # which of its tokens are followed by one whose log-probability is wanted
  next: Sequence[int]  # these tokens
  follow: int  # the token of the prompt after the part; −1: there is none


class Job:
  """A request that an engine works on.

  Args:
    tokenizer: What makes text of tokens; None: the answer has no text.

  Attributes:
    answer: The answer; None until there is one.
    error: Why the answer is cancelled, if something of this request has failed.
    row: The row of the cache.
    source: The row that holds the tokens before those that are read next.
    num_read: How many tokens of the prompt the cache holds.
    number: How many jobs had rows before this one.
    pages: The pages of the row's tokens, if rows share pages.
    saved: A copy of the row while the job is paused, of a type of the cache's own; else None.
  """

  def __init__(self, request: Request, tokenizer: Tokenizer | None):
    self.request = request
    self.prompt = [int(i) for i in request.prompt]
    self.phase = Phase.WAITING
    self.answer: Completion | None = None
    self.error: Exception | None = None
    self.row = self.source = self.num_read = self.number = 0
    self.pages: list[int] = []
    self.saved: Any = None
    self._text = None if tokenizer is None else _text(tokenizer, request)
    self._ids: list[int] = []
    self._scores: list[TokenScore] = []
    self._prompt_scores: list[TokenScore | None] = []
    self._num_taken = self._shared = 0
    self._most_held = sys.maxsize
    self._end: int | None = None

  @property
  def slots(self) -> int:
    """How many tokens the cache should have room for; more if the answer becomes long."""
    soon = min(self.request.max_tokens, len(self._ids) + _AHEAD)
    return len(self.prompt) + soon

  @property
  def known(self) -> list[int]:
    """All tokens so far."""
    return self.prompt + self._ids

  @property
  def cached(self) -> list[int]:
    """The tokens that the row holds: the latest one of the answer is not in it."""
    if self.source != self.row:
      return []  # its beginning is still in the other row alone
    return (self.prompt[: self.num_read] + self._ids[:-1])[: self._most_held]

  @property
  def most_shared(self) -> int:
    """How many tokens may come from another row: at least one is read, and those to be scored."""
    if self.saved is not None:  # nothing is read
      return 0
    scored = self.request.scored_from
    return len(self.prompt) - 1 if scored is None else max(0, min(scored, len(self.prompt)) - 1)

  @property
  def is_scored(self) -> bool:
    """Whether log-probabilities of the prompt are wanted."""
    return self.request.scored_from is not None

  @property
  def num_unread(self) -> int:
    return len(self.prompt) - self.num_read

  @property
  def num_left(self) -> int:
    """The remaining number of tokens."""
    return self.request.max_tokens - len(self._ids)

  def admit(self, row: int, source: int, shared: int, number: int) -> None:
    """Assigns a row to the job; its first tokens come from another row.

    Args:
      source: The row with the first tokens.
      shared: How many of them are shared.
      number: How many jobs had rows before.
    """
    self.number = number
    self.row, self.source, self.num_read = row, source, shared
    self._shared = shared
    self.phase = Phase.READING
    if self.request.scored_from == 0:
      self._prompt_scores.append(None)

  def pause(self, saved: Any) -> None:
    """Takes the row from a job that writes, with a copy of what the row holds."""
    self.saved, self.phase = saved, Phase.WAITING

  def resume(self, row: int) -> None:
    """Gives it a row again, into which `saved` is to be put."""
    self.row = self.source = row
    self.phase = Phase.WRITING

  def moved(self, row: int, rows: Mapping[int, int], slots: int) -> None:
    """Is told the new numbers of the rows, of which some are gone, and how many slots they have."""
    self.row, self.source = row, rows.get(self.source, row)
    if self.answer is not None:  # there is always room for what goes on
      self._most_held = min(self._most_held, slots)

  def part(self, length: int) -> PromptPart:
    """Returns the next part of the prompt, up to `length` tokens."""
    start, stop = self.num_read, min(self.num_read + length, len(self.prompt))
    scored = self.request.scored_from
    first = stop if scored is None else max(start, scored - 1)
    last = min(stop, len(self.prompt) - 1)
    return PromptPart(
      self.prompt[start:stop], range(first - start, max(last, first) - start),
      self.prompt[first + 1 : last + 1], self.prompt[stop] if stop < len(self.prompt) else -1,
    )  # fmt: skip

  def was_read(self, part: PromptPart, scores: Sequence[TokenScore]) -> None:
    """Records that a part is in the cache.

    Args:
      scores: Of the tokens after its places.
    """
    self._prompt_scores += scores[: len(part.places)]
    self.num_read += len(part.ids)
    self.source = self.row
    if not self.num_unread:
      self.phase = Phase.WRITING
      if not self.request.max_tokens:
        self.end('length')

  def wrote(self, token: int, score: TokenScore) -> None:
    """Appends the next token of the answer."""
    self._scores.append(score)
    if token in self.request.ends:
      self._end = token
      self.end('stop')
      return
    self._ids.append(token)
    grammar = self.request.grammar
    if grammar is not None:
      grammar.accept(token)
    if self._text is not None:
      self._text.add(token)
    if (self._text is not None and self._text.is_ended) or (grammar and grammar.is_complete):
      self.end('stop')
    elif not self.num_left:
      self.end('length')

  def restrict(self, allowed_V: np.ndarray) -> None:
    """Sets which tokens may come next, if there is a grammar."""
    if self.request.grammar is not None:
      allowed = self.request.grammar.allowed()
      allowed_V[:] = False
      allowed_V[: len(allowed)] = allowed[: len(allowed_V)]
      if not self.request.grammar.may_end:  # where a grammar has such a token as text
        allowed_V[[token for token in self.request.ends if token < len(allowed_V)]] = False

  def alone(self, call: Callable[..., None], *args: Any) -> None:
    """Calls a method of the job; what it raises ends this job, and no other one."""
    try:
      call(*args)
    except Exception as e:
      self.fail(e)

  def check(self) -> None:
    """Raises the error of a job that has failed."""
    if self.error is not None:
      raise self.error

  def fail(self, error: Exception) -> None:
    """Ends the job without an answer, because part of its request failed."""
    self.error = error
    self.cancel()

  def cancel(self) -> None:
    """Ends the job without its text, which may be what has failed."""
    self._text = None
    self.end('cancelled')

  def end(self, finish: Finish) -> None:
    """Ends the job with the tokens so far."""
    parts: list[str] = []
    if self._text is not None:
      self._text.close()
      parts = self._text.parts
    self.answer = Completion(
      [*self._ids], self._scores, shown(parts), finish, self._prompt_scores, self._shared,
      self._end, parts,
    )  # fmt: skip
    self.phase = Phase.DONE

  def taken(self) -> list[tuple[int, TokenScore]]:
    """Returns the tokens of the answer since the last call, with their log-probabilities."""
    start, self._num_taken = self._num_taken, len(self._ids)
    return list(zip(self._ids[start:], self._scores[start:], strict=False))

  def parts(self) -> list[str]:
    """Returns the parts of the text since the last call that later tokens cannot change."""
    return [] if self._text is None else self._text.news(self.answer is not None)


def _text(tokenizer: Tokenizer, request: Request) -> AnswerText:
  before = request.prompt if request.continues else ()
  return AnswerText(tokenizer, request.stop, before, request.min_tokens)
