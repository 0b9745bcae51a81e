"""How tokens are chosen where a model generates."""

import dataclasses

from paxlite.core.errors import UserError


@dataclasses.dataclass(frozen=True)
class Sampling:
  """How the next token is chosen; the attributes are applied in this order.

  Attributes:
    temperature: Divides the logits; 0 always takes the token with the largest logit.
    top_k: Keeps only this many of the largest logits; 0 is off.
    top_p: Keeps only the smallest set of largest logits whose probabilities sum up to at least
      this; 1 is off.
    repetition_penalty: Divides the positive logits of tokens that the row already contains,
      including the prompt, and multiplies the negative ones (https://arxiv.org/abs/1909.05858),
      before all others; 1 is off.
    min_p: Keeps only tokens with at least this share of the probability of the likeliest one; 0 is
      off.
    presence_penalty: Is subtracted once from the logits of tokens that were generated; 0 is off.
    frequency_penalty: Is subtracted as often as a token was generated; 0 is off.
  """

  temperature: float = 0.0
  top_k: int = 0
  top_p: float = 1.0
  repetition_penalty: float = 1.0
  min_p: float = 0.0
  presence_penalty: float = 0.0
  frequency_penalty: float = 0.0

  def __post_init__(self) -> None:
    for name, good, what in (
      ('temperature', self.temperature >= 0, 'at least 0 (0 takes the likeliest token)'),
      ('top_k', self.top_k >= 0, 'at least 0 (0 is off)'),
      ('top_p', 0 < self.top_p <= 1, 'above 0 and at most 1 (1 is off)'),
      ('repetition_penalty', self.repetition_penalty > 0, 'positive (1 is off)'),
      ('min_p', 0 <= self.min_p < 1, 'at least 0 and below 1 (0 is off)'),
      ('presence_penalty', -2 <= self.presence_penalty <= 2, 'from -2 to 2 (0 is off)'),
      ('frequency_penalty', -2 <= self.frequency_penalty <= 2, 'from -2 to 2 (0 is off)'),
    ):
      if not good:
        raise UserError(f'{name}={getattr(self, name):g} must be {what}')

  @property
  def has_filters(self) -> bool:
    """Whether some tokens are never drawn."""
    return (self.top_k, self.top_p, self.min_p) != (0, 1, 0)

  @property
  def has_penalties(self) -> bool:
    """Whether the choice depends on the tokens before."""
    return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


GREEDY = Sampling()
