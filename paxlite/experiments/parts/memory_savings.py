"""Attributes that decide in which dtype, and in which memory, a train step keeps its arrays."""

from collections.abc import Collection, Iterable
from typing import Literal, get_args

import fiddle as fdl

from paxlite import extensions
from paxlite.config.attribute_kinds import Count, Run, Training
from paxlite.config.templates import config
from paxlite.core.errors import UserError
from paxlite.core.variable_names import DORA_VARIABLES, LORA_VARIABLES
from paxlite.experiments.base import Experiment
from paxlite.layers.attention.attention import Attention
from paxlite.layers.remat import ActivationName, Offloaded

Dtype = Literal['float32', 'bfloat16']


class MemorySavings(
  Experiment, subject='Memory', beside={'USE_LORA': 'USE_DORA LORA_RANK LORA_TARGET_LAYERS'}
):
  """Trades precision, traffic to the host, or what is trained, for memory of the devices.

  LoRA and DoRA train low-rank factors beside the weights, which are frozen.

  A checkpoint that was written with some of these values continues with others; but moments of int8
  stay so.
  """

  ADAM_MOMENTS_DTYPE: Run[Literal['float32', 'bfloat16', 'int8']] = (
    'float32'  # dtype of optimizer moments; bfloat16: stochastic rounding; int8: blocks
  )
  OFFLOAD_OPTIMIZER: Run[bool] = False  # keeps optimizer moments in host memory
  OFFLOAD_ACTIVATIONS: Run[
    list[ActivationName]
  ] = []  # activations kept in host memory for the backward pass
  GRADIENT_DTYPE: Run[Dtype] = (
    'float32'  # dtype of microbatch gradients, which are accumulated in float32
  )
  FROZEN_DTYPE: Run[str] = 'float32'  # dtype or quantization of frozen parameters: int8, int4, nf4

  USE_LORA: Training[bool] = False  # trains low-rank factors and freezes the weights
  USE_DORA: Training[bool] = False  # with USE_LORA, also trains weight magnitudes
  LORA_RANK: Training[Count] = 8  # LoRA rank
  LORA_TARGET_LAYERS: Training[Literal['all', 'attention', 'mlp']] = (
    'all'  # layers with LoRA, unless LORA_TARGETS names weights
  )

  @property
  def saves_trainable_only(self) -> bool:
    return self.USE_LORA and bool(self.CHECKPOINT_RESTORE_PATH)

  @property
  def factor_variables(self) -> list[str]:
    """Regular expressions of what is trained with USE_LORA."""
    return [DORA_VARIABLES if self.USE_DORA else LORA_VARIABLES]

  @property
  def attention_classes(self) -> tuple[type, ...]:
    """The classes of layers that a model may have in the place of attention."""
    return (Attention,)

  def without_factors(self, layer: fdl.Buildable) -> Iterable[fdl.Buildable]:
    """Returns projections of a layer of attention that have no low-rank factors."""
    return ()

  def kept_activations(self, policy: str) -> str | fdl.Config:
    """Returns what a stack needs for its checkpoint policy: a name, or a config with more."""
    policy = 'SAVE_NOTHING' if policy == 'AUTO' else policy
    if not self.OFFLOAD_ACTIVATIONS:
      return policy
    return config(Offloaded, policy=policy, names=list(self.OFFLOAD_ACTIVATIONS))

  def check_continued(self, writer: Experiment, stored: Collection[str]) -> None:
    super().check_continued(writer, stored)
    if self.USE_LORA and isinstance(writer, MemorySavings) and writer.USE_LORA:
      extensions.hook('USE_LORA')(self).check_continued(writer, stored)

  def quantize_frozen(self, task: fdl.Config) -> None:
    """Edits the config of a task so that FROZEN_DTYPE quantizes the frozen weights."""
    if self.FROZEN_DTYPE not in get_args(Dtype):
      extensions.hook('FROZEN_DTYPE of a task')(self, task)

  def validate(self) -> None:
    super().validate()
    if self.USE_LORA:
      extensions.hook('USE_LORA')
    if self.OFFLOAD_OPTIMIZER and self.ADAM_MOMENTS_DTYPE == 'int8':
      raise UserError(
        'OFFLOAD_OPTIMIZER supports float32 and bfloat16 moments: choose either it or '
        'ADAM_MOMENTS_DTYPE=int8'
      )
    is_plain = self.backend.name == 'xla' and self.num_stages == 1
    if self.FROZEN_DTYPE not in get_args(Dtype):
      extensions.hook('FROZEN_DTYPE')(self.FROZEN_DTYPE)
      if not is_plain:
        raise UserError(
          f'FROZEN_DTYPE={self.FROZEN_DTYPE} is for plain XLA on a mesh without stages: choose '
          'FROZEN_DTYPE=bfloat16'
        )
    if self.OFFLOAD_ACTIVATIONS and self.num_stages > 1:
      raise UserError("OFFLOAD_ACTIVATIONS needs a mesh without stages: 'OFFLOAD_ACTIVATIONS=[]'")
    if self.GRADIENT_DTYPE != 'float32' and self.num_stages > 1:
      raise UserError(
        f'GRADIENT_DTYPE={self.GRADIENT_DTYPE} needs a mesh without stages: the gradients of a '
        'pipeline are added up over its ticks. Choose GRADIENT_DTYPE=float32'
      )
