"""EXAONE 4, without a dataset."""

from typing import Literal

from paxlite.experiments.llama import LLaMA
from paxlite.experiments.parts.attention import AttentionKind, QkNorm
from paxlite.experiments.published_models import define


class Exaone4(LLaMA):
  """EXAONE 4: norms after sublayers, and full attention without rotary positions in one of four."""

  VOCAB_SIZE = 102_400
  ROPE_THETA = 1e6
  ROPE_LAYOUT = 'half'
  ROPE_FACTOR = 16.0
  NORM_POLICY: Literal['pre', 'post', 'primer_hybrid'] = 'post'
  QK_NORM: QkNorm = 'per_head'
  SLIDING_WINDOW = 4096
  ATTENTION_PATTERN: list[AttentionKind] = ['sliding', 'sliding', 'sliding', 'full_nope']


__getattr__ = define(globals())  # the published sizes: models.json
