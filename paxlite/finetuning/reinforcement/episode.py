"""An episode: a prompt, and the answers of a model with what was replied to them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Self

from paxlite.finetuning.reinforcement.prompts import Prompt
from paxlite.generation.request import TokenScore


@dataclasses.dataclass
class Episode:
  """One prompt and what followed.

  Attributes:
    prompt: The prompt.
    ids: All tokens.
    is_own: Whether the model wrote each token.
    messages: What was said after the prompt.
    is_over: Whether the episode has ended.
    is_cut: Whether an answer was as long as it may be, or the episode took too many seconds.
    ends: The number of tokens up to the end of each answer.
    rewards: What each reward gave it, by its name; set when it was judged.
    outcome: The part of its reward that no turn has; set when it was judged.
    turn_rewards: The reward of each answer, where its environment gives one to each; else [].
    error: What its environment did wrong, which ended it; '': nothing.
    num_open: How many tokens at the end belong to an answer that goes on.
    log_probs: ln μ of each token by the parameters that wrote it; 0 of others. Rollouts that are
      made ahead note them.
    written: The number of the batch before which each token was written; 0 of others.
    scores: What the engine has said of each token that it has drawn; None of others.
  """

  prompt: Prompt
  ids: list[int]
  is_own: list[bool]
  messages: list[Mapping[str, Any]]
  is_over: bool = False
  is_cut: bool = False
  ends: list[int] = dataclasses.field(default_factory=list)
  rewards: dict[str, float] = dataclasses.field(default_factory=dict)
  outcome: float = 0.0
  turn_rewards: list[float] = dataclasses.field(default_factory=list)
  error: str = ''
  num_open: int = 0
  log_probs: list[float] = dataclasses.field(default_factory=list)
  written: list[int] = dataclasses.field(default_factory=list)
  scores: list[TokenScore | None] = dataclasses.field(default_factory=list)

  def __post_init__(self) -> None:
    self.scores = self.scores or [None] * len(self.ids)

  @classmethod
  def of(cls, prompt: Prompt) -> Self:
    """Returns an episode in which nothing was answered yet."""
    return cls(prompt, [*prompt.ids], [False] * len(prompt.ids), [])

  def append(
    self,
    ids: list[int],
    is_own: bool,
    *messages: Mapping[str, Any],
    scores: Sequence[TokenScore | None] = (),
  ) -> None:
    """Appends what was said, its tokens, and what the engine has said of them."""
    self.ids += ids
    self.scores += scores or [None] * len(ids)
    self.is_own += [is_own] * len(ids)
    if is_own and messages:  # an answer is whole
      self.ends.append(len(self.ids))
    self.messages += messages
