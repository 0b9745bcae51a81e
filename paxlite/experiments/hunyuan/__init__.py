"""Hunyuan's dense models, without a dataset."""

import fiddle as fdl

from paxlite.config.attribute_kinds import Function
from paxlite.experiments.llama import LLaMA
from paxlite.experiments.parts.attention import QkNorm


class HunyuanDense(LLaMA, subject='Attention'):
  """Hunyuan's dense models: LLaMA with norms of queries and keys after their rotation."""

  QK_NORM_AFTER_ROTATION: Function[bool] = True  # applies QK_NORM after RoPE instead of before

  VOCAB_SIZE = 290_943
  ROPE_LAYOUT = 'half'
  QK_NORM: QkNorm = 'per_head'
  USE_FFN_BIAS = False

  def further_steps(self) -> dict[str, fdl.Partial | None]:
    found = super().further_steps()
    if not self.QK_NORM_AFTER_ROTATION:
      return found
    return found | {'qk_norm_tpl': None, 'rotated_norm_tpl': self.qk_norm()}
