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
      arrays of another form: see layers.precision.weight_forms.
    opt_state: The optimizer's state for the trainable parameters.
    overwritten: Collections that a step replaces by their gradients: FP8's scales and amax
      histories. Empty without FP8. They are not optimized or decayed, and not counted in norms.
    skipped: Number of steps skipped so far because gradient or loss was not finite, int32.
    skipped_in_a_row: Number of steps skipped since the last good step, int32.
  """

  step: jax.Array
  params: PyTree
  opt_state: PyTree
  overwritten: PyTree
  skipped: jax.Array
  skipped_in_a_row: jax.Array
