"""Embeddings of runs of tokens beside those of tokens."""

import fiddle as fdl
from flax import linen as nn

from paxlite.config.attribute_kinds import NotNegativeInt, Shape, Training
from paxlite.config.templates import template
from paxlite.core.errors import UserError
from paxlite.experiments.language_model import LanguageModel
from paxlite.layers.embeddings import TokenEmbedding
from paxlite.layers.ngram_embedding import LONGEST, NgramEmbedding, NgramLm

_RATE = 'ngrams/.*=4'  # a row is trained only where its run occurs


class NgramEmbeddings(LanguageModel, subject='Embeddings and logits'):
  """A LanguageModel that may add embeddings of runs of tokens; see layers/ngram_embedding.py."""

  NGRAM_ROWS: Shape[NotNegativeInt] = (
    0  # rows of each table of hashed runs of tokens, whose embeddings are added; 0: none
  )
  NGRAM_LENGTHS: Shape[list[int]] = [2]  # run lengths in tokens, 2 to 4; each has a table

  @property
  def LEARNING_RATE_FACTORS(self) -> Training[list[str]]:
    """Learning-rate factors, 'PATTERN=FACTOR'; a variable takes its first match."""
    return [*super().LEARNING_RATE_FACTORS, *self.ngram_rate]

  @property
  def ngram_rate(self) -> list[str]:
    """The factor of the learning rate of the tables."""
    return [_RATE] if self.NGRAM_ROWS and not self.USE_LORA else []

  def validate(self) -> None:
    super().validate()
    lengths = self.NGRAM_LENGTHS
    if not lengths or len({*lengths}) < len(lengths) or not {*lengths} <= {*range(2, LONGEST + 1)}:
      raise UserError(f'NGRAM_LENGTHS={lengths}: choose different numbers from 2 to {LONGEST}')

  def decoder(self) -> fdl.Config:
    lm = super().decoder()
    if self.NGRAM_ROWS:
      fdl.update_callable(lm, NgramLm)
      table = template(
        TokenEmbedding, vocab_size=self.NGRAM_ROWS, model_dims=self.MODEL_DIMS,
        dtype=self.FPROP_DTYPE, emb_init=fdl.Config(nn.initializers.normal, stddev=0.0),
      )  # fmt: skip
      lm.ngram_tpl = template(
        NgramEmbedding, rows=self.NGRAM_ROWS, lengths=self.NGRAM_LENGTHS, table_tpl=table
      )
    return lm
