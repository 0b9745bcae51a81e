"""Attributes that decide in which dtype, and in which memory, a train step keeps its arrays."""

from typing import Any, Literal

import fiddle as fdl

from paxlite.core.attribute_kinds import Run
from paxlite.core.errors import UserError
from paxlite.core.templates import config
from paxlite.experiments.base import Experiment
from paxlite.layers.remat import ActivationName, Offloaded
from paxlite.parallel.partitioning import takes_taps

Dtype = Literal['float32', 'bfloat16']


class MemorySavings(Experiment):
  """Trades precision, or traffic to the host, for memory of the devices.

  A checkpoint that was written with some of these values continues with others.
  """

  ADAM_MOMENTS_DTYPE: Run[Dtype] = 'float32'  # moments in bfloat16 are rounded stochastically
  OFFLOAD_OPTIMIZER: Run[bool] = False  # keeps moments in the memory of the host
  OFFLOAD_ACTIVATIONS: Run[list[ActivationName]] = []  # activations kept in the host's memory
  GRADIENT_DTYPE: Run[Dtype] = 'float32'  # a microbatch's gradients; their sum is float32
  FROZEN_DTYPE: Run[Dtype] = 'float32'  # parameters that are not trained, as under LoRA

  def kept_activations(self, policy: str) -> str | fdl.Config:
    """Returns what a stack needs for its checkpoint policy: a name, or a config with more."""
    if not self.OFFLOAD_ACTIVATIONS:
      return policy
    return config(Offloaded, policy=policy, names=list(self.OFFLOAD_ACTIVATIONS))

  def validate(self) -> None:
    super().validate()
    if self.OFFLOAD_ACTIVATIONS and self.mesh_sizes.get('stage', 1) > 1:
      raise UserError(
        "OFFLOAD_ACTIVATIONS needs a mesh without stages: '--fdl.OFFLOAD_ACTIVATIONS=[]'"
      )
    if self.GRADIENT_DTYPE != 'float32' and self.mesh_sizes.get('stage', 1) > 1:
      raise UserError(
        f'GRADIENT_DTYPE={self.GRADIENT_DTYPE} needs a mesh without stages: the gradients of a '
        'pipeline are added up over its ticks. Choose --fdl.GRADIENT_DTYPE=float32'
      )
    if self.GRADIENT_DTYPE != 'float32':
      task: Any = fdl.get_callable(self.task())
      if takes_taps(task.loss):
        return
      raise UserError(
        f'GRADIENT_DTYPE={self.GRADIENT_DTYPE} needs a loss with the argument taps, as Task.loss '
        f'has it, and that of {task.__name__} has none: --fdl.GRADIENT_DTYPE=float32'
      )
