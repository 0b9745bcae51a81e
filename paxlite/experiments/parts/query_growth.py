"""Queries that grow with their positions, so that attention to many keys stays as sharp."""

import fiddle as fdl

from paxlite.config.attribute_kinds import Count, Function, NotNegative
from paxlite.config.templates import template
from paxlite.experiments.language_model import LanguageModel
from paxlite.layers.scales import PositionScale


class QueryGrowth(LanguageModel, subject='Attention'):
  """A LanguageModel that may multiply queries by a logarithm of their positions."""

  # Queries are multiplied by 1 + QUERY_GROWTH · ln(1 + ⌊position / QUERY_GROWTH_LENGTH⌋).
  QUERY_GROWTH: Function[NotNegative] = (
    0.0  # growth of queries with the logarithm of their positions, as in Ministral 3; 0: none
  )

  @property
  def QUERY_GROWTH_LENGTH(self) -> Function[Count]:
    """Tokens after which QUERY_GROWTH makes queries larger for the first time."""
    return self.ROPE_ORIGINAL_LENGTH

  def position_scale(self) -> fdl.Partial:
    """Returns the template of the scale of queries by their positions."""
    return template(PositionScale, growth=self.QUERY_GROWTH, length=self.QUERY_GROWTH_LENGTH)

  def further_steps(self) -> dict[str, fdl.Partial | None]:
    scale = self.position_scale() if self.QUERY_GROWTH else None
    return super().further_steps() | {'position_scale_tpl': scale}
