"""The train state: arrays alone, which a train step maps to the next state."""

from typing import Any

import jax
from flax import struct


@struct.dataclass
class TrainState:
  """Attributes:

  step: Batches drawn so far, int32.
  params: The model's parameters, float32.
  opt_state: The optimizer's state of the trainable parameters.
  overwritten: Collections that a step replaces by their gradients: FP8's scales and amax histories;
    empty where there are none. Not optimized, not counted in norms, not decayed.
  skipped: Steps skipped so far because their gradient was not finite, int32.
  skipped_in_a_row: Steps skipped since the last good step, int32.
  """

  step: jax.Array
  params: Any
  opt_state: Any
  overwritten: Any
  skipped: jax.Array
  skipped_in_a_row: jax.Array
