"""Gemma 4's text model, without a dataset."""

import fiddle as fdl

from paxlite.config.attribute_kinds import Count, Shape
from paxlite.config.templates import template
from paxlite.core.errors import UserError
from paxlite.experiments.gemma import Gemma3
from paxlite.experiments.parts.attention import AttentionKind
from paxlite.experiments.parts.experts import MixtureOfExperts
from paxlite.experiments.parts.feed_forward import Activation
from paxlite.experiments.parts.linked_blocks import LinkedBlocks
from paxlite.experiments.parts.stack import BlockKind
from paxlite.experiments.registry import register
from paxlite.layers.moe.scaled_router import ScaledRouter
from paxlite.layers.scaled_block import NormedExperts, ScaledBlock


class Gemma4(LinkedBlocks, MixtureOfExperts, Gemma3):  # type: ignore[override]
  """The text model of Gemma 4: full attention has wider heads, in which keys may be the values.

  In small sizes, blocks have embeddings of their own, and the last ones read the keys of others.
  Blocks have a factor that training leaves alone. All blocks have experts beside a dense layer, or
  none has; models without experts have as many dense blocks as layers.
  """

  VOCAB_SIZE = 262_144
  NORM_SCALE_OFFSET = 0.0
  QUERY_PRE_ATTN_SCALAR = 1
  SOFTMAX_CAP_LOGITS = 30.0
  ROPE_FACTOR = 1.0
  USE_VALUE_NORM = True
  FULL_DIMS_PER_HEAD = 512
  FULL_ROPE_SHARE = 0.25

  BLOCKS_PER_LAYER = 1
  NUM_EXPERTS = 128
  NUM_EXPERTS_PER_TOKEN = 8
  NUM_SHARED_EXPERTS = 1
  EXPERT_ACTIVATION_CLS: Activation = 'gelu'
  USE_GATED_EXPERTS = True
  USE_DROPLESS_MOE = True
  AUX_LOSS_COEF = 0.001

  @property
  def SHARED_EXPERT_HIDDEN_DIMS(self) -> Shape[Count]:
    """Width inside the dense layer beside the experts."""
    return self.HIDDEN_DIMS

  def shared_hidden_dims_of(self, kind: BlockKind) -> int:
    of_others = super().shared_hidden_dims_of(kind)
    return self.READER_HIDDEN_DIMS if self.is_reader(kind) else of_others

  @property
  def num_first_blocks(self) -> int:
    return 0  # blocks are alike from the first one on

  def validate(self) -> None:
    super().validate()
    if self.NUM_DENSE_BLOCKS not in (0, self.NUM_LAYERS):
      raise UserError(
        f'NUM_DENSE_BLOCKS={self.NUM_DENSE_BLOCKS} of {type(self).__name__} must be 0 or '
        f'NUM_LAYERS={self.NUM_LAYERS}'
      )
    if self.NORM_POLICY != 'primer_hybrid':
      raise UserError(
        f'blocks of {type(self).__name__} need NORM_POLICY=primer_hybrid, not {self.NORM_POLICY}'
      )

  def block(self) -> fdl.Partial:
    return template(
      ScaledBlock,
      norm_tpl=self.norm(),
      post_norm_tpl=self.norm(),
      attention_tpl=self.attention(),
      ffn_tpl=self.feed_forward(self.HIDDEN_DIMS),
      dropout=self.DROPOUT_PROB,
    )

  def block_of(self, kind: BlockKind) -> fdl.Partial:
    block = super().block_of(kind)
    if kind.has_experts:
      experts = self.experts()
      experts.norm_tpl = self.norm()
      block.ffn_sees_residual = True
      block.ffn_tpl = template(
        NormedExperts,
        experts_tpl=experts,
        shared_tpl=self.feed_forward(self.shared_hidden_dims_of(kind)),
        norm_tpl=self.norm(),
      )
    return block

  def router(self) -> fdl.Partial:
    return template(ScaledRouter, top_k=self.NUM_EXPERTS_PER_TOKEN, epsilon=self.LAYERNORM_EPSILON)


@register
class Gemma4_31B(Gemma4):
  """30,697,345,340 parameters: the text model of gemma-4-31B."""

  NUM_LAYERS = 60
  NUM_DENSE_BLOCKS = 60
  NUM_HEADS = 32
  NUM_KV_HEADS = 16
  FULL_KV_HEADS = 4
  KEYS_ARE_VALUES = True
  MODEL_DIMS = 5376
  HIDDEN_DIMS = 21504
  ICI_MESH_SHAPE = [1, 8, 1]
  DCN_MESH_SHAPE = [1, 2, 1]


@register
class Gemma4_26B_A4B(Gemma4):
  """25,233,141,790 parameters: the text model of gemma-4-26B-A4B, with experts."""

  NUM_LAYERS = 30
  NUM_HEADS = 16
  NUM_KV_HEADS = 8
  FULL_KV_HEADS = 2
  KEYS_ARE_VALUES = True
  MODEL_DIMS = 2816
  HIDDEN_DIMS = 2112
  EXPERT_HIDDEN_DIMS = 704
  ICI_MESH_SHAPE = [1, 8, 1]
  DCN_MESH_SHAPE = [1, 2, 1]


@register
class Gemma4E2B(Gemma4):
  """4,628,569,379 parameters: the text model of gemma-4-E2B.

  The sizes are those of text_config in the published config.json. Of the parameters, 2,348,810,240
  are the table of the blocks' embeddings.
  """

  NUM_LAYERS = 35
  NUM_DENSE_BLOCKS = 35
  NUM_HEADS = 8
  NUM_KV_HEADS = 1
  MODEL_DIMS = 1536
  HIDDEN_DIMS = 6144
  SLIDING_WINDOW = 512
  ATTENTION_PATTERN: list[AttentionKind] = ['sliding', 'sliding', 'sliding', 'sliding', 'full']
  LAYER_INPUT_DIMS = 256
  NUM_KEY_READERS = 20
  READER_HIDDEN_DIMS = 12288
  ICI_MESH_SHAPE = [1, 8, 1]


@register
class Gemma4E4B(Gemma4):
  """7,463,013,418 parameters: the text model of gemma-4-E4B.

  The sizes are those of text_config in the published config.json. Of the parameters, 2,818,572,288
  are the table of the blocks' embeddings.
  """

  NUM_LAYERS = 42
  NUM_DENSE_BLOCKS = 42
  NUM_HEADS = 8
  NUM_KV_HEADS = 2
  MODEL_DIMS = 2560
  HIDDEN_DIMS = 10240
  SLIDING_WINDOW = 512
  LAYER_INPUT_DIMS = 256
  NUM_KEY_READERS = 18
  ICI_MESH_SHAPE = [1, 8, 1]
