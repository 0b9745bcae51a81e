"""A bias of the logits."""

import fiddle as fdl

from paxlite.config.attribute_kinds import Shape
from paxlite.config.templates import template
from paxlite.experiments.language_model import LanguageModel
from paxlite.layers.embeddings import LmHeadBias


class LogitsBias(LanguageModel, subject='Embeddings and logits'):
  """A LanguageModel that may add a bias to its logits."""

  USE_SOFTMAX_BIAS: Shape[bool] = False  # logits bias

  def logits_bias(self) -> fdl.Partial | None:
    return template(LmHeadBias, vocab_size=self.VOCAB_SIZE) if self.USE_SOFTMAX_BIAS else None
