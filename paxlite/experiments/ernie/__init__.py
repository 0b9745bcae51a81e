"""ERNIE 4.5, without a dataset."""

from typing import Literal

from paxlite.experiments.llama import LLaMA
from paxlite.experiments.parts.experts import GatedExperts, Router
from paxlite.experiments.parts.logits_bias import LogitsBias
from paxlite.experiments.published_models import define


class Ernie4_5(LLaMA):
  """ERNIE 4.5: LLaMA's block; Hugging Face's files have the order of rotary pairs that Pax has."""

  VOCAB_SIZE = 103_424
  DIMS_PER_HEAD = 128
  HEADS_SPAN_MODEL = False
  ROPE_THETA = 500_000.0


class Ernie4_5Moe(LogitsBias, GatedExperts, LLaMA):
  """ERNIE 4.5 with experts, which a softmax chooses with a bias that balances the load."""

  VOCAB_SIZE = 103_424
  ROPE_THETA = 500_000.0

  NUM_DENSE_BLOCKS = 1
  ROUTER: Router = 'balanced'
  ROUTER_SCORES: Literal['sigmoid', 'softmax'] = 'softmax'
  BEST_PER_EXPERT_GROUP = 1
  NUM_EXPERTS_PER_TOKEN = 6
  NUM_SHARED_EXPERTS = 2


__getattr__ = define(globals())  # the published sizes: models.json
