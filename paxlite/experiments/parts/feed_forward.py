"""Feed-forward layers: their attributes and their templates."""

from typing import Literal

import fiddle as fdl

from paxlite.config.attribute_kinds import Count, Function, Shape
from paxlite.config.templates import template
from paxlite.core.errors import UserError
from paxlite.experiments.parts.width_and_norms import WidthAndNorms
from paxlite.layers.feedforward import FeedForward, GatedFeedForward

Activation = Literal['gelu', 'gelu_exact', 'relu', 'relu2', 'silu', 'clamped_swiglu']


class FeedForwardLayers(WidthAndNorms, subject='Feed-forward layers'):
  """Feed-forward layers, gated or not."""

  ACTIVATION_CLS: Function[Activation] = 'relu'  # activation function of feed-forward layers
  USE_GATED_ACTIVATION: Shape[bool] = (
    False  # gates feed-forward layers: the activation is multiplied by a second projection
  )

  @property
  def HIDDEN_DIMS(self) -> Shape[Count]:
    """Width inside a feed-forward layer."""
    return 4 * self.MODEL_DIMS

  @property
  def USE_FFN_BIAS(self) -> Shape[bool]:
    """Biases of feed-forward layers."""
    return self.USE_BIAS

  def validate(self) -> None:
    super().validate()
    if (self.ACTIVATION_CLS == 'clamped_swiglu') > self.USE_GATED_ACTIVATION:
      raise UserError('ACTIVATION_CLS=clamped_swiglu needs USE_GATED_ACTIVATION=True')

  def feed_forward(self, hidden_dims: int) -> fdl.Partial:
    """Returns the template of a feed-forward layer."""
    return template(
      GatedFeedForward if self.USE_GATED_ACTIVATION else FeedForward,
      model_dims=self.MODEL_DIMS,
      hidden_dims=hidden_dims,
      activation=self.ACTIVATION_CLS,
      dropout=self.DROPOUT_PROB,
    )

  @property
  def ffn_params(self) -> int:
    """The number of parameters in the matrix multiplications of one feed-forward layer."""
    return (3 if self.USE_GATED_ACTIVATION else 2) * self.MODEL_DIMS * self.HIDDEN_DIMS
