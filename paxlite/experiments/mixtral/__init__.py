"""Mixtral: Mistral's block with eight gated experts, without a dataset."""

from paxlite.experiments.llama import LLaMA
from paxlite.experiments.parts.experts import GatedExperts
from paxlite.experiments.published_models import define


class Mixtral(GatedExperts, LLaMA):
  """Mixtral: LLaMA's block with gated experts."""

  ROPE_THETA = 1e6
  ROPE_LAYOUT = 'half'
  NUM_EXPERTS = 8
  AUX_LOSS_COEF = 0.02


__getattr__ = define(globals())  # the published sizes: models.json
