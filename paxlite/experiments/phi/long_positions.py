"""LongRoPE: rotary positions that are stretched by a factor for each wavelength."""

import fiddle as fdl

from paxlite.config.attribute_kinds import Function
from paxlite.config.templates import template
from paxlite.core.errors import UserError
from paxlite.experiments.language_model import LanguageModel
from paxlite.layers.rotary import LongRopeRotaryEmbedding


class LongPositions(LanguageModel, subject='Positions'):
  """A LanguageModel that supports ROPE_SCALING='longrope'."""

  ROPE_SHORT_FACTORS: Function[
    list[float]
  ] = []  # LongRoPE wavelength factors for MAX_SEQ_LEN up to ROPE_ORIGINAL_LENGTH
  ROPE_LONG_FACTORS: Function[
    list[float]
  ] = []  # LongRoPE wavelength factors for larger MAX_SEQ_LEN

  def validate(self) -> None:
    super().validate()
    if not self.USE_ROTARY_POSITION_EMB or self.ROPE_SCALING != 'longrope':
      return
    factors = self.ROPE_SHORT_FACTORS + self.ROPE_LONG_FACTORS
    if self.ROPE_FACTOR > 1 and min([self.ROPE_ORIGINAL_LENGTH - 1, *factors]) <= 0:
      raise UserError(
        'ROPE_SCALING=longrope needs ROPE_ORIGINAL_LENGTH above 1, and ROPE_SHORT_FACTORS and '
        'ROPE_LONG_FACTORS above 0'
      )
    if self.stretches_positions:
      for name in ('ROPE_SHORT_FACTORS', 'ROPE_LONG_FACTORS'):
        if len(getattr(self, name)) != self.rotary_dims // 2:
          raise UserError(
            f'{name} must have {self.rotary_dims // 2} numbers, one for each pair of dimensions, '
            f'and has {len(getattr(self, name))}'
          )

  def long_rotary(self, base: dict[str, object]) -> fdl.Partial:
    return template(
      LongRopeRotaryEmbedding,
      factors=self.ROPE_LONG_FACTORS if self.has_long_factors else self.ROPE_SHORT_FACTORS,
      stretched=self.rotary_length,
      **base,
    )
