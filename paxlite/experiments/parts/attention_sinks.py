"""Attention sinks: a virtual key of each head, without a value."""

import fiddle as fdl

from paxlite.config.attribute_kinds import Shape
from paxlite.config.templates import template
from paxlite.experiments.language_model import LanguageModel
from paxlite.layers.attention.attention import AttentionSinks


class AttentionSinkLogits(LanguageModel, subject='Attention'):
  """A LanguageModel with learned attention sink logits."""

  USE_ATTENTION_SINKS: Shape[bool] = False  # learned sink logit per head, without a value

  def dot_product_attention(self) -> fdl.Partial:
    attention = super().dot_product_attention()
    if self.USE_ATTENTION_SINKS:
      attention.sinks_tpl = template(AttentionSinks, num_heads=self.NUM_HEADS)
    return attention
