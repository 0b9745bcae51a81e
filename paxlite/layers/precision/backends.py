"""The backends of a model's matrix multiplications: plain XLA, FP8, Transformer Engine, or int8.

A backend is chosen once, when an experiment is built (experiments.language_model). It reaches the
model as templates, so that layers do not depend on it.
"""

import dataclasses
import os
from typing import Literal

from paxlite.core.errors import UserError

BackendName = Literal['xla', 'xla_fp8', 'te', 'te_fp8', 'te_fp4', 'int8']
TeRecipe = Literal['bf16', 'DelayedScaling', 'Float8CurrentScaling', 'MXFP8', 'NVFP4']


@dataclasses.dataclass(frozen=True)
class Backend:
  """A backend, and why it was chosen."""

  name: BackendName  # the name of the backend
  reason: str  # the attributes or environment variables that chose it, for messages

  def __str__(self) -> str:
    return f'{self.name} ({self.reason})'


def environment_flag(name: str) -> bool:
  """Returns whether an environment variable is on; Pax's scripts set ENABLE_TE to 1 or 0, or not.

  Raises UserError if it has another value.
  """
  text = os.environ.get(name, '')
  values = {'': False, '0': False, 'false': False, '1': True, 'true': True}
  if text.lower() not in values:
    raise UserError(f'the environment has {name}={text}: it must be 1 or 0')
  return values[text.lower()]


def fused_attention() -> bool:
  """Returns whether Transformer Engine may use cuDNN's attention.

  The environment variable NVTE_FUSED_ATTN decides it. Transformer Engine reads it too. Raises
  UserError if NVTE_FUSED_ATTN is neither 0 nor 1.
  """
  text = os.environ.get('NVTE_FUSED_ATTN', '1')
  if text not in ('0', '1'):
    raise UserError(f'the environment has NVTE_FUSED_ATTN={text}: it must be 1 or 0')
  return text == '1'
