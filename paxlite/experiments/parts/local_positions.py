"""Different rotary positions for sliding and full attention."""

from paxlite.config.attribute_kinds import Function, OffAtZero
from paxlite.experiments.language_model import LanguageModel


class LocalPositions(LanguageModel, subject='Positions'):
  """A LanguageModel with other, or unstretched, positions in sliding attention."""

  ROPE_LOCAL_THETA: Function[OffAtZero] = 0.0  # RoPE base in sliding attention; 0: ROPE_THETA
  ROPE_STRETCHES_LOCAL: Function[bool] = True  # stretches RoPE in sliding attention too

  def rotary_theta(self, is_local: bool) -> float:
    return (is_local and self.ROPE_LOCAL_THETA) or super().rotary_theta(is_local)

  def stretches(self, is_local: bool) -> bool:
    return super().stretches(is_local) and not (is_local and not self.ROPE_STRETCHES_LOCAL)
