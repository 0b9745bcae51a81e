"""The chosen tokens of a program, as Python numbers."""

from typing import Any

from paxlite.generation.request import TokenScore
from paxlite.generation.sampling import SampledTokens


class ScoredTokens:
  """Tokens with their log-probabilities; faster than reading array elements one by one.

  Args:
    chosen: Arrays of numpy, [B, …] or [B, T, …].
    most: Of arrays [B, T, …], the first columns that are needed.
  """

  def __init__(self, chosen: SampledTokens, most: int | None = None):
    if most is not None:
      columns: Any = (None if x is None else x[:, :most] for x in chosen)
      chosen = SampledTokens(*columns)
    self._token, self._log_prob = chosen.token.tolist(), chosen.log_prob.tolist()
    self._ids, self._top = chosen.top_ids.tolist(), chosen.top_log_probs.tolist()
    self._experts = None if chosen.experts is None else chosen.experts.tolist()

  def at(self, place: int | tuple[int, int], top: int) -> tuple[int, TokenScore]:
    """Returns a token, and its score with the `top` most likely tokens."""
    values: list[Any] = [self._token, self._log_prob, self._ids, self._top]
    values += [] if self._experts is None else [self._experts]
    for i in (place,) if isinstance(place, int) else place:
      values = [x[i] for x in values]
    token, log_prob, ids, tops, *experts = values
    likeliest = dict(zip(ids[:top], tops, strict=False)) if top else {}
    return token, TokenScore(log_prob, likeliest, *experts)

  def scores(self, row: int, top: int) -> list[TokenScore]:
    """Returns the log-probabilities of the tokens of a row."""
    return [self.at((row, i), top)[1] for i in range(len(self._token[row]))]
