"""The train state, a tree of arrays that a train step maps to the next state."""

import jax
from flax import struct

from paxlite.core.trees import PyTree


@struct.dataclass
class TrainState:
  """The state of a training run after a step."""

  step: jax.Array  # number of steps done so far, including skipped steps, int32
  # the model's parameters, float32; frozen ones may be bfloat16, or quantized: see
  # quantization.schemes
  params: PyTree
  opt_state: PyTree  # the optimizer's state for the trainable parameters
  overwritten: PyTree  # `fp8_state`, by the name that checkpoints have
  # number of steps skipped so far because gradient or loss was not finite, int32
  skipped: jax.Array
  skipped_in_a_row: jax.Array  # number of steps skipped since the last good step, int32

  @property
  def fp8_state(self) -> PyTree:
    """FP8's scales and amax histories, which their gradients replace; {} without FP8."""
    return self.overwritten
