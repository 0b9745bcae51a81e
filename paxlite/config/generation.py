"""How a model samples tokens."""

import dataclasses

from paxlite.core.errors import UserError


@dataclasses.dataclass(frozen=True)
class Sampling:
  """How the next token is sampled; the attributes apply in this order."""

  temperature: float = 0.0  # divides the logits; 0 takes the token with the largest logit
  top_k: int = 0  # keeps the k largest logits; 0 is off
  # keeps the smallest set of most likely tokens with a total probability of at least this; 1 is off
  top_p: float = 1.0
  # before all others, divides positive logits and multiplies negative logits of tokens already in
  # the sequence, prompt included (https://arxiv.org/abs/1909.05858); 1 is off
  repetition_penalty: float = 1.0
  # keeps tokens with at least this share of the most likely token's probability; 0 is off
  min_p: float = 0.0
  presence_penalty: float = 0.0  # subtracted once from the logits of generated tokens; 0 is off
  # subtracted from a token's logit for each time it was generated; 0 is off
  frequency_penalty: float = 0.0

  def __post_init__(self) -> None:
    for name, good, what in (
      ('temperature', self.temperature >= 0, 'at least 0 (0 takes the most likely token)'),
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
    """Whether some tokens are never sampled."""
    return (self.top_k, self.top_p, self.min_p) != (0, 1, 0)

  @property
  def has_penalties(self) -> bool:
    """Whether the choice depends on earlier tokens."""
    return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


GREEDY = Sampling()
