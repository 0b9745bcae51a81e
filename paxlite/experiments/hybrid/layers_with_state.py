"""Shared by the parts of hybrid models, which mix layers with a state and attention."""

import fiddle as fdl
from fiddle import selectors

from paxlite.config.attribute_kinds import Count, Shape
from paxlite.config.templates import template
from paxlite.experiments.hybrid.causal_convolution import CausalConvolution
from paxlite.experiments.language_model import LanguageModel
from paxlite.layers.projection import Projection


class LayersWithState(LanguageModel, subject='Layers with a state'):
  """The base of all kinds of layers with a state."""

  CONVOLUTION_WIDTH: Shape[Count] = 4  # tokens in the kernel of a short convolution
  USE_CONVOLUTION_BIAS: Shape[bool] = False  # biases of short convolutions

  @property
  def USE_STATE_BIAS(self) -> Shape[bool]:
    """Projection biases of layers with a state."""
    return self.USE_BIAS

  def convolution(self) -> fdl.Partial:
    """Returns the template of a short convolution."""
    return template(
      CausalConvolution, width=self.CONVOLUTION_WIDTH, use_bias=self.USE_CONVOLUTION_BIAS
    )

  def model(self) -> fdl.Config:
    lm = super().model()
    for kind in self.state_classes if self.USE_STATE_BIAS != self.USE_BIAS else ():
      for layer in selectors.select(lm, kind, check_nonempty=False):
        selectors.select(layer, Projection).set(use_bias=self.USE_STATE_BIAS)
    return lm

  @property
  def state_classes(self) -> tuple[type, ...]:
    """The classes of layers with a state that a model may have; parts add theirs."""
    return ()

  @property
  def attention_classes(self) -> tuple[type, ...]:
    return super().attention_classes + self.state_classes
