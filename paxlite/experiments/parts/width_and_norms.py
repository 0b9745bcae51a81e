"""Shared by all layers of a model: width, dtype, biases, dropout, initial values and norms."""

from typing import Literal

import fiddle as fdl
from flax import linen as nn

from paxlite.config.attribute_kinds import Below1, Count, Function, NotNegative, Shape, Training
from paxlite.config.templates import template
from paxlite.core.errors import UserError
from paxlite.experiments.base import Experiment
from paxlite.layers.norms import LayerNorm, RmsNorm

Norm = Literal['LayerNorm', 'RmsNorm']

_NORMS = {'LayerNorm': LayerNorm, 'RmsNorm': RmsNorm}


class WidthAndNorms(Experiment, subject='All layers'):
  """Shared by all layers, with the defaults of Pax's base class of language models."""

  MODEL_DIMS: Shape[Count] = 2048  # activation width between blocks
  FPROP_DTYPE: Training[Literal['bfloat16', 'float32', 'float16']] = 'bfloat16'  # activation dtype
  USE_BIAS: Shape[bool] = False  # projection biases in attention and feed-forward layers
  DROPOUT_PROB: Training[Below1] = (
    0.0  # dropout of attention, feed-forward layers and residual branches
  )
  WEIGHT_INIT: Training[Literal['normal', 'xavier_uniform']] = (
    'normal'  # initial distribution of weights
  )
  INIT_STD: Training[NotNegative] = 0.02  # initial standard deviation of weights
  NORM_CLS: Function[Norm] = 'RmsNorm'  # norm class
  # Before attention and feed-forward layers (pre), after them (post), or both. The names are those
  # of praxis.
  NORM_POLICY: Shape[Literal['pre', 'post', 'primer_hybrid']] = (
    'pre'  # norm before a layer, after it, or both
  )
  LAYERNORM_EPSILON: Function[NotNegative] = 1e-6  # ε added to the variance in norms

  @property
  def OUTPUT_INIT_STD(self) -> Training[NotNegative]:
    """INIT_STD of attention and feed-forward output projections, except experts'."""
    return self.INIT_STD

  @property
  def NORM_SCALE_OFFSET(self) -> Function[float]:
    """Number added to a norm's stored scale."""
    return 1.0 if self.NORM_CLS == 'LayerNorm' else 0.0

  def validate(self) -> None:
    super().validate()
    if self.OUTPUT_INIT_STD != self.INIT_STD and self.WEIGHT_INIT != 'normal':
      raise UserError(
        f'OUTPUT_INIT_STD={self.OUTPUT_INIT_STD:g} needs WEIGHT_INIT=normal, not {self.WEIGHT_INIT}'
      )

  def norm(self) -> fdl.Partial:
    """Returns a new template of a norm, so that an edit of one norm leaves the others unchanged."""
    return template(
      _NORMS[self.NORM_CLS], epsilon=self.LAYERNORM_EPSILON, offset=self.NORM_SCALE_OFFSET,
      dtype=self.FPROP_DTYPE,
    )  # fmt: skip

  def weight_init(self, std: float) -> fdl.Config:
    """Returns the initializer of weight matrices; `std` is the standard deviation of 'normal'."""
    if self.WEIGHT_INIT == 'xavier_uniform':
      return fdl.Config(nn.initializers.xavier_uniform)
    return fdl.Config(nn.initializers.normal, stddev=std)
