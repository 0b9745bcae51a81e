"""The backends of a model's matrix multiplications: plain XLA, FP8, Transformer Engine, or int8.

A backend is chosen once, when an experiment is built (experiments.language_model). It reaches the
model as templates, so that layers do not depend on it. Optional packages are imported where they
are used.
"""

import dataclasses
import os
from typing import Literal

from flax import linen as nn

from paxlite.core import shell
from paxlite.core.errors import UserError

BackendName = Literal['xla', 'xla_fp8', 'te', 'te_fp8', 'int8']
TeRecipe = Literal['bf16', 'DelayedScaling', 'Float8CurrentScaling', 'MXFP8']

# The largest absolute value becomes 127. By qwix itself it becomes 127.5, so that the last bit of a
# weight would decide between −127 and −128.
_TO_127 = f'absmax,{127.5 / 127}'
_INSTALL_QWIX = f'USE_INT8 needs qwix: {shell.install("int8")}'


@dataclasses.dataclass(frozen=True)
class Backend:
  """A backend, and why it was chosen.

  Attributes:
    name: The name of the backend.
    reason: The attributes or environment variables that chose it, for messages.
  """

  name: BackendName
  reason: str

  def __str__(self) -> str:
    return f'{self.name} ({self.reason})'


def environment_flag(name: str) -> bool:
  """Returns whether an environment variable is on; Pax's scripts set ENABLE_TE to 1 or 0, or not.

  Raises:
    UserError: It has another value.
  """
  text = os.environ.get(name, '')
  values = {'': False, '0': False, 'false': False, '1': True, 'true': True}
  if text.lower() not in values:
    raise UserError(f'the environment has {name}={text}: it must be 1 or 0')
  return values[text.lower()]


def fused_attention() -> bool:
  """Returns whether Transformer Engine may use cuDNN's attention.

  The environment variable NVTE_FUSED_ATTN decides it. Transformer Engine reads it too.

  Raises:
    UserError: NVTE_FUSED_ATTN is neither 0 nor 1.
  """
  text = os.environ.get('NVTE_FUSED_ATTN', '1')
  if text not in ('0', '1'):
    raise UserError(f'the environment has NVTE_FUSED_ATTN={text}: it must be 1 or 0')
  return text == '1'


def int8_model(model: nn.Module, backward: bool) -> nn.Module:
  """Returns `model` with int8 × int8 → int32 in the products with the weights of its blocks.

  At every step, activations are scaled by the largest absolute value of each token, and weights by
  that of each output channel. For the gradient of a weight, the largest absolute value of each
  channel is taken over the whole batch. Parameters and checkpoints do not change.

  Args:
    model: The model; its methods `hidden` and `predicted` must apply all of its blocks.
    backward: Whether both products of the backward pass are in int8 too.

  Raises:
    UserError: qwix is not installed.
  """
  try:
    import qwix
  except ImportError:
    raise UserError(_INSTALL_QWIX) from None
  rule = qwix.QtRule(
    module_path=r'.*/einsum(_in|_out)?',
    weight_qtype='int8',
    act_qtype='int8',
    bwd_qtype='int8' if backward else None,
    weight_calibration_method=_TO_127,
    act_calibration_method=_TO_127,
    bwd_calibration_method=_TO_127,
  )
  return qwix.quantize_model(model, qwix.QtProvider([rule]), methods=['hidden', 'predicted'])
