"""Factors of the embeddings and of the logits."""

import math

import fiddle as fdl

from paxlite.config.attribute_kinds import Function, Positive
from paxlite.experiments.language_model import LanguageModel


class EmbeddingFactors(LanguageModel, subject='Embeddings and logits'):
  """A LanguageModel that may scale embeddings and logits."""

  SCALE_EMBEDDING: Function[bool] = False  # multiplies embeddings by √MODEL_DIMS
  EMBEDDING_FACTOR: Function[float] = 1.0  # multiplier of embeddings, besides √MODEL_DIMS
  LOGITS_DIVISOR: Function[Positive] = 1.0  # divisor of logits

  def token_embedding(self) -> fdl.Partial:
    embedding = super().token_embedding()
    root = math.sqrt(self.MODEL_DIMS) if self.SCALE_EMBEDDING else 1.0
    embedding.lookup_scale = self.EMBEDDING_FACTOR * root
    embedding.attend_scale = 1 / self.LOGITS_DIVISOR
    return embedding

  def head(self) -> fdl.Partial | None:
    head = super().head()
    if head is not None:
      head.attend_scale = 1 / self.LOGITS_DIVISOR
    return head
