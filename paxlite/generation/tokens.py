"""The tokens that a program has chosen, as numbers of Python."""

from typing import Any

from paxlite.generation.request import TokenScore
from paxlite.generation.sampling import SampledTokens


class ScoredTokens:
  """Tokens with their log-probabilities. To read elements of arrays one by one would be slower.

  Args:
    chosen: Arrays of numpy, [B, …] or [B, T, …].
    most: Of arrays [B, T, …], the first columns that are needed.
  """

  def __init__(self, chosen: SampledTokens, most: int | None = None):
    if most is not None:
      chosen = SampledTokens(*(x[:, :most] for x in chosen))
    self._token, self._log_prob = chosen.token.tolist(), chosen.log_prob.tolist()
    self._ids, self._top = chosen.top_ids.tolist(), chosen.top_log_probs.tolist()

  def at(self, place: int | tuple[int, int], top: int) -> tuple[int, float, dict[int, float]]:
    """Returns a token, its log-probability, and the most likely tokens' log-probabilities."""
    values: list[Any] = [self._token, self._log_prob, self._ids, self._top]
    for i in (place,) if isinstance(place, int) else place:
      values = [x[i] for x in values]
    token, log_prob, ids, tops = values
    return token, log_prob, dict(zip(ids[:top], tops, strict=False)) if top else {}

  def scores(self, row: int, top: int) -> list[TokenScore]:
    """Returns the log-probabilities of the tokens of a row."""
    found = (self.at((row, i), top) for i in range(len(self._token[row])))
    return [TokenScore(log_prob, likeliest) for _, log_prob, likeliest in found]
