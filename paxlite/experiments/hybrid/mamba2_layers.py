"""Blocks with Mamba 2 between blocks of attention."""

from typing import Literal

import fiddle as fdl

from paxlite.config.attribute_kinds import Count, Function, NotNegative, Shape
from paxlite.config.templates import template
from paxlite.core.errors import UserError
from paxlite.experiments.hybrid.decay import Steps
from paxlite.experiments.hybrid.gated_norm import Gate, GateThenRmsNorm, RmsNormThenGate
from paxlite.experiments.hybrid.layers_with_state import LayersWithState
from paxlite.experiments.hybrid.mamba2 import Mamba2
from paxlite.experiments.parts.attention import AttentionKind
from paxlite.experiments.parts.stack import Activation

MambaNorm = Literal['after_gate', 'before_gate', 'none']


class Mamba2Layers(LayersWithState, subject='Mamba 2'):
  """A LanguageModel in which ATTENTION_PATTERN may have 'mamba2'."""

  MAMBA_HEADS: Shape[Count] = 128  # heads of a Mamba 2 layer
  MAMBA_HEAD_DIMS: Shape[Count] = 64  # width of a Mamba 2 head
  MAMBA_GROUPS: Shape[Count] = 1  # Mamba 2 head groups that share B and C
  MAMBA_STATE_DIMS: Shape[Count] = 128  # Mamba 2 state size per head dimension
  MAMBA_NORM: Shape[MambaNorm] = 'after_gate'  # norm of Mamba 2's output, after or before its gate
  MAMBA_DT_MIN: Function[NotNegative] = 0.0  # smallest time step Δt in Mamba 2
  MAMBA_DT_MAX: Function[NotNegative] = 0.0  # largest time step Δt in Mamba 2; 0: unlimited

  @property
  def MAMBA_ACTIVATION_CLS(self) -> Function[Activation]:
    """Activation after Mamba 2's convolutions."""
    return self.ACTIVATION_CLS

  @property
  def state_kinds(self) -> set[AttentionKind]:
    return super().state_kinds | {'mamba2'}

  def validate(self) -> None:
    super().validate()
    if self.MAMBA_HEADS % self.MAMBA_GROUPS:
      raise UserError(
        f'MAMBA_HEADS={self.MAMBA_HEADS} is not divisible by MAMBA_GROUPS={self.MAMBA_GROUPS}'
      )
    if 0 < self.MAMBA_DT_MAX < self.MAMBA_DT_MIN:
      raise UserError(
        f'MAMBA_DT_MIN={self.MAMBA_DT_MIN:g} is more than MAMBA_DT_MAX={self.MAMBA_DT_MAX:g}'
      )

  @property
  def state_classes(self) -> tuple[type, ...]:
    return (*super().state_classes, Mamba2)

  def attention_with_state(self, kind: AttentionKind) -> fdl.Partial:
    if kind != 'mamba2':
      return super().attention_with_state(kind)
    return template(
      Mamba2, model_dims=self.MODEL_DIMS, num_heads=self.MAMBA_HEADS,
      head_dims=self.MAMBA_HEAD_DIMS, num_groups=self.MAMBA_GROUPS,
      state_dims=self.MAMBA_STATE_DIMS, activation=self.MAMBA_ACTIVATION_CLS,
      convolution_tpl=self.convolution(),
      steps_tpl=template(Steps, least=self.MAMBA_DT_MIN, most=self.MAMBA_DT_MAX),
      norm_tpl=self.mamba_norm(),
    )  # fmt: skip

  def mamba_norm(self) -> fdl.Partial:
    """Returns the template of the norm and the gate of what Mamba 2 reads."""
    if self.MAMBA_NORM == 'none':
      return template(Gate, dtype=self.FPROP_DTYPE)
    return template(
      GateThenRmsNorm if self.MAMBA_NORM == 'after_gate' else RmsNormThenGate,
      num_groups=self.MAMBA_GROUPS, epsilon=self.LAYERNORM_EPSILON, dtype=self.FPROP_DTYPE,
    )  # fmt: skip

  def attention_params_of(self, kind: AttentionKind | None) -> int:
    if kind != 'mamba2':
      return super().attention_params_of(kind)
    inner = self.MAMBA_HEADS * self.MAMBA_HEAD_DIMS
    of_groups = 2 * self.MAMBA_GROUPS * self.MAMBA_STATE_DIMS
    return self.MODEL_DIMS * (3 * inner + of_groups + self.MAMBA_HEADS)

  def attention_flops_of(self, kind: AttentionKind | None) -> float:
    """A state is read once and written once; the backward pass costs twice as much."""
    if kind != 'mamba2':
      return super().attention_flops_of(kind)
    return 12.0 * self.MAMBA_HEADS * self.MAMBA_HEAD_DIMS * self.MAMBA_STATE_DIMS
