"""A stack with further inputs of blocks besides activations; see layers.linked_stack."""

import fiddle as fdl

from paxlite.config.attribute_kinds import Training
from paxlite.config.templates import template
from paxlite.core.errors import UserError
from paxlite.experiments.language_model import LanguageModel
from paxlite.experiments.parts.stack import BlockKind
from paxlite.layers.linked_stack import LinkedTransformer


class LinkedStack(LanguageModel):
  """A LanguageModel in which a block may read what an earlier one has handed on.

  Where it does, blocks have numbers, and the stack repeats none.
  """

  @property
  def links(self) -> str:
    """The attributes that link blocks, with their values; '' if none does."""
    return ''

  @property
  def has_links(self) -> bool:
    """Whether blocks get more than activations."""
    return bool(self.links)

  @property
  def key_sources(self) -> list[int | None]:
    """For each block the number of the block whose keys it reads, or None."""
    return [None] * self.NUM_LAYERS

  @property
  def USE_REPEATED_LAYER(self) -> Training[bool]:  # type: ignore[override]
    """Stacks the weights of all layers in arrays [L, …]; a loop computes the layers.

    Linked blocks are computed one by one, whichever experiment trains them.
    """
    return not self.has_links

  @property
  def block_kinds(self) -> list[BlockKind]:
    kinds = super().block_kinds
    return [kind._replace(number=i) for i, kind in enumerate(kinds)] if self.has_links else kinds

  @property
  def blocks_per_layer(self) -> int:
    return 1 if self.has_links else super().blocks_per_layer

  @property
  def num_first_blocks(self) -> int:
    return 0 if self.has_links else super().num_first_blocks

  def validate(self) -> None:
    super().validate()
    if self.has_links and self.USE_REPEATED_LAYER:
      raise UserError(
        f'{self.links} needs USE_REPEATED_LAYER=False: what goes from block to block does '
        'not go through a loop'
      )

  def stack(self) -> fdl.Partial:
    if not self.has_links:
      return super().stack()
    return template(
      LinkedTransformer, block_tpls=[self.block_of(kind) for kind in self.block_kinds],
      sources=self.key_sources, checkpoint_policy=self.kept_activations(self.CHECKPOINT_POLICY),
    )  # fmt: skip
