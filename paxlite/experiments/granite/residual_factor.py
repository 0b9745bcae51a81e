"""A factor of what the layers of a block add to the activations."""

import fiddle as fdl

from paxlite.config.attribute_kinds import Function
from paxlite.config.templates import template
from paxlite.core.errors import UserError
from paxlite.experiments.language_model import LanguageModel
from paxlite.layers.scales import Scale


class ResidualFactor(LanguageModel, subject='Stack of layers'):
  """A LanguageModel that may scale its residual branches, as Granite, and as a ladder does."""

  RESIDUAL_FACTOR: Function[float] = (
    1.0  # multiplier of what attention and feed-forward layers add to the residual stream
  )

  def validate(self) -> None:
    super().validate()
    if self.RESIDUAL_FACTOR != 1 and not self.has_plain_blocks:
      raise UserError(
        f'RESIDUAL_FACTOR={self.RESIDUAL_FACTOR:g} needs NORM_POLICY=pre, '
        f'BLOCK_ORDER=sequential, and blocks as those of LLaMA: {type(self).__name__} has others'
      )

  def block(self) -> fdl.Partial:
    block = super().block()
    if self.RESIDUAL_FACTOR != 1:
      block.post_norm_tpl = template(Scale, factor=self.RESIDUAL_FACTOR)
    return block
