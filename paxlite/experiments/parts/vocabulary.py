"""Embeddings of tokens and positions, and the logits."""

import fiddle as fdl
from flax import linen as nn

from paxlite.config.attribute_kinds import (
  Below1,
  Count,
  Function,
  NotNegative,
  Run,
  Shape,
  Training,
)
from paxlite.config.templates import template
from paxlite.experiments.parts.positions import Positions
from paxlite.experiments.parts.width_and_norms import WidthAndNorms
from paxlite.layers.embeddings import LearnedPositions, LmHead, SinusoidalPositions, TokenEmbedding


class Vocabulary(WidthAndNorms, Positions, subject='Embeddings and logits'):
  """The first and the last layer of a model."""

  VOCAB_SIZE: Shape[Count] = 32000  # token ids of the model
  SEPARATE_EMBEDDING: Shape[bool] = False  # unties the logits' weight from the embedding
  SOFTMAX_CAP_LOGITS: Function[float] = (
    30.0  # soft cap of logits, cap · tanh(logits / cap); ≤ 0: off
  )
  EMBEDDING_DROPOUT_PROB: Training[Below1] = 0.0  # embedding dropout
  NUM_LOSS_CHUNKS: Run[Count] = 1  # vocabulary chunks with only one's logits in memory

  @property
  def SOFTMAX_INIT_STD(self) -> Training[NotNegative]:
    """Initial standard deviation of embeddings and of the logits' weight."""
    return self.INIT_STD

  @property
  def vocab_size(self) -> int | None:
    return self.VOCAB_SIZE

  def token_embedding(self) -> fdl.Partial:
    """Returns the template of the embedding of tokens."""
    return template(
      TokenEmbedding, vocab_size=self.VOCAB_SIZE, model_dims=self.MODEL_DIMS,
      dtype=self.FPROP_DTYPE, emb_init=self.weight_init(self.SOFTMAX_INIT_STD),
    )  # fmt: skip

  def head(self) -> fdl.Partial | None:
    """Returns the template of the logits' weight; None if it is the embedding's."""
    if not self.SEPARATE_EMBEDDING:
      return None
    return template(
      LmHead, vocab_size=self.VOCAB_SIZE, model_dims=self.MODEL_DIMS, dtype=self.FPROP_DTYPE,
      w_init=self.weight_init(self.SOFTMAX_INIT_STD),
    )  # fmt: skip

  def logits_bias(self) -> fdl.Partial | None:
    """Returns the template of the bias of the logits, or None."""
    return None

  def positions(self) -> fdl.Partial | None:
    """Returns the template of the position embedding, or None if positions are rotary."""
    if self.USE_ROTARY_POSITION_EMB:
      return None
    if not self.TRAINABLE_POSITION_EMB:
      return template(SinusoidalPositions, model_dims=self.MODEL_DIMS, dtype=self.FPROP_DTYPE)
    return template(
      LearnedPositions, max_length=self.MAX_POSITION_EMBEDDINGS, model_dims=self.MODEL_DIMS,
      dtype=self.FPROP_DTYPE, emb_init=fdl.Config(nn.initializers.normal, stddev=self.INIT_STD),
    )  # fmt: skip
