"""Blocks with both layers on the same activations."""

from typing import Literal

import fiddle as fdl

from paxlite.config.attribute_kinds import Function
from paxlite.config.templates import template
from paxlite.core.errors import UserError
from paxlite.experiments.language_model import LanguageModel
from paxlite.layers.transformer import ParallelBlock

BlockOrder = Literal['sequential', 'parallel', 'parallel_one_norm']


class ParallelBlocks(LanguageModel, subject='Stack of layers'):
  """A LanguageModel that may compute attention and feed-forward layers in parallel."""

  # A parallel block adds what attention and the feed-forward layer make of the same activations.
  BLOCK_ORDER: Function[BlockOrder] = (
    'sequential'  # a block's two layers: in turn, or in parallel after two norms or one
  )

  def validate(self) -> None:
    super().validate()
    is_plain = self.replaced(BLOCK_ORDER='sequential').has_plain_blocks
    if self.BLOCK_ORDER != 'sequential' and not is_plain:
      raise UserError(
        f'BLOCK_ORDER={self.BLOCK_ORDER} needs NORM_POLICY=pre, and blocks as those of LLaMA: '
        f'{type(self).__name__} has others'
      )

  @property
  def has_plain_blocks(self) -> bool:
    return self.BLOCK_ORDER == 'sequential' and super().has_plain_blocks

  def block(self) -> fdl.Partial:
    if self.BLOCK_ORDER == 'sequential':
      return super().block()
    return template(
      ParallelBlock, norm_tpl=self.norm(),
      ff_norm_tpl=self.norm() if self.BLOCK_ORDER == 'parallel' else None,
      attention_tpl=self.attention(), ffn_tpl=self.feed_forward(self.HIDDEN_DIMS),
      dropout=self.DROPOUT_PROB,
    )  # fmt: skip
