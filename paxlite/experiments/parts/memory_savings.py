"""Attributes that decide in which dtype, and in which memory, a train step keeps its arrays."""

from typing import Literal, get_args

import fiddle as fdl

from paxlite import extensions
from paxlite.config.attribute_kinds import Run
from paxlite.config.templates import config
from paxlite.core.errors import UserError
from paxlite.experiments.parts.adapters import Adapters
from paxlite.layers.remat import ActivationName, Offloaded

Dtype = Literal['float32', 'bfloat16']


class MemorySavings(Adapters, subject='Memory'):
  """Trades precision, traffic to the host, or what is trained, for memory of the devices.

  A checkpoint that was written with some of these values continues with others; but moments of int8
  stay so.
  """

  ADAM_MOMENTS_DTYPE: Run[Literal['float32', 'bfloat16', 'int8']] = (
    'float32'  # dtype of the optimizer's moments; bfloat16 is rounded stochastically; int8: blocks
  )
  OFFLOAD_OPTIMIZER: Run[bool] = False  # keeps the optimizer's moments in the memory of the host
  OFFLOAD_ACTIVATIONS: Run[
    list[ActivationName]
  ] = []  # activations that are kept in the memory of the host for the backward pass
  GRADIENT_DTYPE: Run[Dtype] = (
    'float32'  # dtype of the gradients of a microbatch; they are accumulated in float32
  )
  FROZEN_DTYPE: Run[str] = (
    'float32'  # dtype of frozen parameters, or their quantization: int8, int4, nf4
  )

  def kept_activations(self, policy: str) -> str | fdl.Config:
    """Returns what a stack needs for its checkpoint policy: a name, or a config with more."""
    if not self.OFFLOAD_ACTIVATIONS:
      return policy
    return config(Offloaded, policy=policy, names=list(self.OFFLOAD_ACTIVATIONS))

  def quantize_frozen(self, task: fdl.Config) -> None:
    """Edits the config of a task so that FROZEN_DTYPE quantizes the frozen weights."""
    if self.FROZEN_DTYPE not in get_args(Dtype):
      extensions.hook('FROZEN_DTYPE of a task')(self, task)

  def validate(self) -> None:
    super().validate()
    if self.OFFLOAD_OPTIMIZER and self.ADAM_MOMENTS_DTYPE == 'int8':
      raise UserError(
        'OFFLOAD_OPTIMIZER moves moments of float32 or bfloat16: choose one of it and '
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
