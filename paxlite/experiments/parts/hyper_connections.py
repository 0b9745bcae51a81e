"""Hyper-connections: the attributes of streams of activations, and templates of their blocks."""

import fiddle as fdl

from paxlite.config.attribute_kinds import Count, Function, Positive, Shape
from paxlite.config.templates import template
from paxlite.core.errors import UserError
from paxlite.experiments.language_model import LanguageModel
from paxlite.layers.hyper_block import HyperBlock
from paxlite.layers.hyper_connections import EqualStreams, HyperConnection, MergedStreams


class HyperConnections(LanguageModel, subject='Hyper-connections'):
  """A LanguageModel whose blocks read and write several streams of activations.

  The first block of the stack makes the streams of the embeddings, and the last one merges them.
  """

  NUM_STREAMS: Shape[Count] = 4  # streams of activations between blocks
  STREAM_ITERATIONS: Function[Count] = (
    20  # how often the matrix that mixes streams is normalized along its columns
  )
  STREAM_FLOOR: Function[Positive] = (
    1e-6  # what is added to the weights of streams, and to the sums that normalize them
  )

  def validate(self) -> None:
    if self.num_stages > 1:
      raise UserError(
        f'NUM_STREAMS={self.NUM_STREAMS} needs a mesh without an axis stage: the first and '
        'the last block of the stack are not like the others'
      )
    super().validate()
    if self.NORM_POLICY != 'pre':
      raise UserError(f'blocks with hyper-connections need NORM_POLICY=pre, not {self.NORM_POLICY}')

  @property
  def has_plain_blocks(self) -> bool:
    return False

  @property
  def takes_modules(self) -> bool:
    return False  # which would read several streams

  def block(self) -> fdl.Partial:
    return template(
      HyperBlock,
      norm_tpl=self.norm(),
      connection_tpl=template(
        HyperConnection, iterations=self.STREAM_ITERATIONS, **self._of_streams
      ),
      attention_tpl=self.attention(),
      ffn_tpl=self.feed_forward(self.HIDDEN_DIMS),
      dropout=self.DROPOUT_PROB,
    )

  def stack(self) -> fdl.Partial:
    stack = super().stack()
    stack.first_tpls = [
      template(EqualStreams, num_streams=self.NUM_STREAMS),
      *stack.first_tpls,
    ]
    stack.last_tpls = [*stack.last_tpls, template(MergedStreams, **self._of_streams)]
    return stack

  @property
  def block_names(self) -> list[str]:
    names = (name.partition('first_') for name in super().block_names)
    return [name if not number else f'first_{int(number) + 1}' for name, _, number in names]

  @property
  def merging_name(self) -> str:
    """The name of the block that merges the streams, in the variables of the stack."""
    return f'last_{sum(name.startswith("last_") for name in super().block_names)}'

  @property
  def _of_streams(self) -> dict[str, object]:
    return dict(floor=self.STREAM_FLOOR, epsilon=self.LAYERNORM_EPSILON)

  @property
  def matmul_params(self) -> int:
    N = self.NUM_STREAMS
    weights = 2 * self.NUM_LAYERS * (2 * N + N * N) + N
    return super().matmul_params + weights * N * self.MODEL_DIMS
