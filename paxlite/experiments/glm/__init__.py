"""GLM-4 and GLM-4.5, without a dataset."""

from typing import Literal

from paxlite.experiments.llama import LLaMA
from paxlite.experiments.parts.experts import GatedExperts, Router
from paxlite.experiments.parts.partial_positions import PartialPositions
from paxlite.experiments.parts.prediction import MultiTokenPrediction
from paxlite.experiments.published_models import define


class GLM4(PartialPositions, LLaMA):
  """GLM-4-0414: norms before and after sublayers, and rotary positions in half of a head."""

  VOCAB_SIZE = 151_552
  DIMS_PER_HEAD = 128
  HEADS_SPAN_MODEL = False
  ROPE_FRACTION = 0.5
  NORM_POLICY: Literal['pre', 'post', 'primer_hybrid'] = 'primer_hybrid'


class GLM4Moe(MultiTokenPrediction, PartialPositions, GatedExperts, LLaMA):
  """GLM-4.5: a router that is balanced by a bias, and rotary positions in half of a head."""

  VOCAB_SIZE = 151_552
  DIMS_PER_HEAD = 128
  HEADS_SPAN_MODEL = False
  ROPE_THETA = 1e6
  ROPE_LAYOUT = 'half'
  ROPE_FRACTION = 0.5
  USE_QKV_BIAS = True

  NUM_DENSE_BLOCKS = 1
  ROUTER: Router = 'balanced'
  NUM_EXPERTS_PER_TOKEN = 8
  NUM_SHARED_EXPERTS = 1
  AUX_LOSS_COEF = 0.0001


__getattr__ = define(globals())  # the published sizes: models.json
