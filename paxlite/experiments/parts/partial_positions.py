"""Rotary positions in a part of the dimensions of a head."""

import fiddle as fdl

from paxlite.config.attribute_kinds import Fraction, Function
from paxlite.config.templates import template
from paxlite.experiments.language_model import LanguageModel
from paxlite.layers.rotary import PartialRotary


class PartialPositions(LanguageModel, subject='Positions'):
  """A LanguageModel that may leave some dimensions of queries and keys without positions."""

  ROPE_FRACTION: Function[Fraction] = 1.0  # share of head dimensions that RoPE rotates

  @property
  def rotary_dims(self) -> int:
    return int(super().rotary_dims * self.ROPE_FRACTION)

  @property
  def rotated(self) -> str:
    share = '' if self.ROPE_FRACTION == 1 else f' × ROPE_FRACTION={self.ROPE_FRACTION:g}'
    return super().rotated + share

  def rotary(self, is_local: bool = False) -> fdl.Partial:
    rotary = super().rotary(is_local)
    if self.ROPE_FRACTION == 1:
      return rotary
    return template(PartialRotary, dims=self.rotary_dims, rotary_tpl=rotary)
