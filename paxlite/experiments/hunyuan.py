"""Hunyuan's dense models, without a dataset."""

from paxlite.experiments.llama import LLaMA
from paxlite.experiments.parts.attention import QkNorm


class HunyuanDense(LLaMA):
  """Hunyuan's dense models: LLaMA with norms of queries and keys after their rotation."""

  VOCAB_SIZE = 290_943
  ROPE_LAYOUT = 'half'
  QK_NORM: QkNorm = 'per_head'
  QK_NORM_AFTER_ROTATION = True
  USE_FFN_BIAS = False
