"""The train state, a tree of arrays that a train step maps to the next state."""

import jax
from flax import struct

from paxlite.core.trees import PyTree


@struct.dataclass
class TrainState:
  """The state of a training run after a step.

  Attributes:
    step: Number of steps done so far, including skipped steps, int32.
    params: The model's parameters, float32; frozen ones may be bfloat16, or
      quantized: see quantization.schemes.
    opt_state: The optimizer's state for the trainable parameters.
    overwritten: `fp8_state`, by the name that checkpoints have.
    skipped: Number of steps skipped so far because gradient or loss was not finite, int32.
    skipped_in_a_row: Number of steps skipped since the last good step, int32.
  """

  step: jax.Array
  params: PyTree
  opt_state: PyTree
  overwritten: PyTree
  skipped: jax.Array
  skipped_in_a_row: jax.Array

  @property
  def fp8_state(self) -> PyTree:
    """FP8's scales and amax histories, which their gradients replace; {} without FP8."""
    return self.overwritten
