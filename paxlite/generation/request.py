"""A request to a model, and its answer."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

import numpy as np

from paxlite.config.generation import GREEDY, Sampling
from paxlite.core.errors import UserError
from paxlite.generation.sampling import MOST_ENDS, MOST_TOP

Finish = Literal['stop', 'length', 'cancelled']


class Grammar(Protocol):
  """Decides which tokens may come next, for one answer."""

  def allowed(self) -> np.ndarray:
    """Returns whether each id may be the next token, bool [V or fewer]."""
    ...

  def accept(self, token: int) -> None:
    """Records the chosen token."""
    ...

  @property
  def may_end(self) -> bool:
    """Whether the text may end here, so that a token that ends the answer may come next."""
    ...

  @property
  def is_complete(self) -> bool:
    """Whether no token can follow."""
    ...


@dataclasses.dataclass(frozen=True)
class Request:
  """A prompt to be continued."""

  prompt: Sequence[int]  # token ids, at least one
  max_tokens: int  # the most new tokens; 0 only reads the prompt
  sampling: Sampling = GREEDY  # how tokens are chosen
  # Of what is drawn at random. The same seed and sample give the same tokens, whatever else is
  # generated at the same time.
  seed: int = 0
  sample: int = 0  # the number of this answer among several to one prompt with one seed
  # so many tokens come before one that ends the answer, or completes a text that does
  min_tokens: int = 0
  ends: Sequence[int] = ()  # token ids that end the answer, and are not part of it
  # texts that end the answer; what comes before the first of them is its text
  stop: Sequence[str] = ()
  # is added to the logits of tokens, by their ids
  bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
  grammar: Grammar | None = None  # says which tokens may come next; None: all
  top_log_probs: int = 0  # how many of the likeliest tokens are reported at each token
  # The log-probabilities of the prompt's tokens from this position on are reported; None: those of
  # no token. That of position 0 does not exist.
  scored_from: int | None = None
  # whether the text of the answer goes on from that of the prompt, with the space that its first
  # token may begin with; False: it is the text of the new tokens alone
  continues: bool = True

  def __post_init__(self) -> None:
    if self.max_tokens < 0:
      raise UserError(f'max_tokens={self.max_tokens} must be at least 0')
    if not 0 <= self.min_tokens <= self.max_tokens:
      raise UserError(
        f'min_tokens={self.min_tokens} must be from 0 to max_tokens={self.max_tokens}'
      )
    if len(self.ends) > MOST_ENDS:
      raise UserError(f'{len(self.ends)} stop tokens; at most {MOST_ENDS} are possible')
    if not 0 <= self.top_log_probs <= MOST_TOP:
      raise UserError(f'top_log_probs={self.top_log_probs} must be from 0 to {MOST_TOP}')
    if not 0 <= self.seed < 1 << 64:
      raise UserError(f'seed={self.seed} must be from 0 to 2**64 - 1')


@dataclasses.dataclass(frozen=True)
class TokenScore:
  """The log-probability of a token, in nats, before temperature and filters."""

  log_prob: float  # ln p of the token
  # ln p of the likeliest tokens by their ids, as many as were asked for. Of a prompt's token, the
  # likeliest one is always there.
  top: Mapping[int, float]
  # a number of the experts that the model has chosen for the token before, of an engine that tracks
  # them: see layers/moe/chosen_experts.py
  experts: int = 0

  @property
  def is_greedy(self) -> bool:
    """Whether no token is more likely; for a prompt's token."""
    return self.log_prob >= max(self.top.values())


@dataclasses.dataclass(frozen=True)
class Completion:
  """The text that a model generated after a prompt."""

  ids: list[int]  # the new tokens, without one that ends the answer; with those of a text that does
  scores: list[TokenScore]  # their log-probabilities, and that of the token that ended the answer
  # their text up to the first of the texts that end it; '' if the engine has no tokenizer
  text: str
  # 'stop' after such a token or text, or at the end of a grammar, otherwise 'length'
  finish: Finish
  # those of the prompt's tokens from `scored_from` on; None at position 0
  prompt_scores: list[TokenScore | None] = dataclasses.field(default_factory=list)
  shared: int = 0  # how many tokens of the prompt were taken from another row
  end: int | None = None  # the token that ended the answer; None: it ended otherwise
  # the text with the names of special tokens, which are Marks (spelling.py)
  parts: list[str] = dataclasses.field(default_factory=list)

  @property
  def spelled(self) -> str:
    """The text with its special tokens, for whatever interprets the answer."""
    return ''.join(self.parts)


def check_ids(ids: Sequence[int] | np.ndarray, vocab_size: int, what: str) -> None:
  """Raises UserError, with the wrong id and its position, unless all ids are in the vocabulary."""
  try:
    array = np.asarray(ids)
  except ValueError:  # a list of lists of different lengths
    array = np.zeros(0, object)
  if not len(ids):
    return
  if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
    raise UserError(f'{what} must be a list of token ids, which are integers')
  (wrong,) = np.nonzero((array < 0) | (array >= vocab_size))
  if wrong.size:
    raise UserError(
      f'{what} has the id {array[wrong[0]]} at position {wrong[0]}: the ids of the vocabulary are '
      f'0 to {vocab_size - 1:,}'
    )
