"""Attention temperature: queries that grow, so that attention to many keys stays as sharp."""

import fiddle as fdl

from paxlite.config.attribute_kinds import Count, Function, NotNegative
from paxlite.config.templates import template
from paxlite.experiments.language_model import LanguageModel
from paxlite.layers.scales import PositionScale


class AttentionTemperature(LanguageModel, subject='Attention'):
  """A LanguageModel that may multiply queries by 1 + SCALE · ln(1 + ⌊position / FLOOR⌋)."""

  ATTENTION_TEMPERATURE_SCALE: Function[NotNegative] = (
    0.0  # logarithmic growth of queries with position, as in Llama 4; 0: none
  )

  @property
  def ATTENTION_TEMPERATURE_FLOOR(self) -> Function[Count]:
    """Tokens after which ATTENTION_TEMPERATURE_SCALE first scales queries."""
    return self.ROPE_ORIGINAL_LENGTH

  def position_scale(self) -> fdl.Partial:
    """Returns the template of the scale of queries by their positions."""
    return template(
      PositionScale,
      growth=self.ATTENTION_TEMPERATURE_SCALE,
      length=self.ATTENTION_TEMPERATURE_FLOOR,
    )

  def further_steps(self) -> dict[str, fdl.Partial | None]:
    scale = self.position_scale() if self.ATTENTION_TEMPERATURE_SCALE else None
    return super().further_steps() | {'position_scale_tpl': scale}


QueryGrowth = AttentionTemperature  # its former name
