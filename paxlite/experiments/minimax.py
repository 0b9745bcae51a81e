"""MiniMax-Text-01: lightning attention between blocks of softmax attention, without a dataset."""

import fiddle as fdl

from paxlite.config.attribute_kinds import Function
from paxlite.config.templates import template
from paxlite.core.errors import UserError
from paxlite.experiments.mixtral import Mixtral
from paxlite.experiments.parts.attention import AttentionKind
from paxlite.experiments.parts.stack import BlockKind
from paxlite.experiments.registry import register
from paxlite.layers.attention.attention import FullWidthNorm
from paxlite.layers.attention.output_gate import OutputGate
from paxlite.layers.linear_attention.decay import LayerDecay
from paxlite.layers.linear_attention.lightning import LightningAttention
from paxlite.layers.normed_residual import NormedResidualBlock

_LIGHTNING: list[AttentionKind] = ['lightning']


class MiniMax(Mixtral, subject='Lightning attention (MiniMax)'):
  """The architecture: Mixtral's, with normed residual branches, and most blocks with a state.

  The decay of a state depends on the number of its block. So no two blocks are alike, and the stack
  repeats none.
  """

  # A sum is α · x + β · y, of the normed activations x and of what the layer y makes of them.
  FULL_ATTENTION_ALPHA: Function[float] = 1.0  # factor of x beside softmax attention
  FULL_ATTENTION_BETA: Function[float] = 1.0  # factor of softmax attention
  LIGHTNING_ALPHA: Function[float] = 1.0  # factor of x beside lightning attention
  LIGHTNING_BETA: Function[float] = 1.0  # factor of lightning attention
  FFN_ALPHA: Function[float] = 1.0  # factor of x beside experts
  FFN_BETA: Function[float] = 1.0  # factor of experts

  ROPE_THETA = 1e7
  AUX_LOSS_COEF = 0.001
  ATTENTION_PATTERN: list[AttentionKind] = [*7 * _LIGHTNING, 'full']

  @property
  def state_kinds(self) -> set[AttentionKind]:
    return super().state_kinds | {'lightning'}

  @property
  def num_first_blocks(self) -> int:
    return self.NUM_LAYERS

  def has_experts(self, block: int) -> bool:
    return True

  @property
  def block_kinds(self) -> list[BlockKind]:
    return [kind._replace(number=i) for i, kind in enumerate(super().block_kinds)]

  def validate(self) -> None:
    super().validate()
    if self.NUM_DENSE_BLOCKS or self.BLOCKS_PER_LAYER != 1:
      raise UserError(
        f'NUM_DENSE_BLOCKS={self.NUM_DENSE_BLOCKS} and BLOCKS_PER_LAYER={self.BLOCKS_PER_LAYER} '
        f'must be 0 and 1: all blocks of {type(self).__name__} have experts'
      )
    found = self.BLOCK_ORDER, self.NORM_POLICY, self.RESIDUAL_FACTOR
    if found != ('sequential', 'pre', 1):
      raise UserError(
        'blocks with normed residual branches need BLOCK_ORDER=sequential, NORM_POLICY=pre and '
        f'RESIDUAL_FACTOR=1, not {found[0]}, {found[1]} and {found[2]:g}'
      )

  def block_of(self, kind: BlockKind) -> fdl.Partial:
    if kind.attention == 'lightning':
      whole = super().block_of(kind._replace(attention='full'))
      attention, factors = self._lightning(kind), (self.LIGHTNING_ALPHA, self.LIGHTNING_BETA)
    else:
      whole = super().block_of(kind)
      attention = whole.attention_tpl
      factors = self.FULL_ATTENTION_ALPHA, self.FULL_ATTENTION_BETA
    return template(
      NormedResidualBlock,
      norm_tpl=whole.norm_tpl,
      attention_tpl=attention,
      ffn_tpl=whole.ffn_tpl,
      attention_factors=factors,
      ffn_factors=(self.FFN_ALPHA, self.FFN_BETA),
      dropout=whole.dropout,
    )

  def _lightning(self, kind: BlockKind) -> fdl.Partial:
    assert kind.number is not None
    norm = self.norm()
    norm.epsilon = 1e-6  # whatever that of the other norms is
    sizes: dict[str, object] = dict(model_dims=self.MODEL_DIMS, num_heads=self.NUM_HEADS)
    return template(
      LightningAttention,
      head_dims=self.DIMS_PER_HEAD,
      activation=self.ACTIVATION_CLS,
      decay_tpl=template(LayerDecay, layer=kind.number, layers=self.NUM_LAYERS),
      norm_tpl=template(FullWidthNorm, norm_tpl=norm),
      gate_tpl=template(OutputGate, head_dim=self.DIMS_PER_HEAD, **sizes),
      **sizes,
    )

  def attention_params_of(self, kind: AttentionKind | None) -> int:
    if kind != 'lightning':
      return super().attention_params_of(kind)
    return 5 * self.MODEL_DIMS * self.NUM_HEADS * self.DIMS_PER_HEAD

  def attention_flops_of(self, kind: AttentionKind | None) -> float:
    """A state is read once and written once; the backward pass costs twice as much."""
    if kind != 'lightning':
      return super().attention_flops_of(kind)
    return 12.0 * self.NUM_HEADS * self.DIMS_PER_HEAD**2


@register
class MiniMax_Text_01(MiniMax):
  """456,089,655,296 parameters: MiniMax-Text-01; a token uses 46 billion of them."""

  NUM_LAYERS = 80
  NUM_HEADS = 64
  NUM_KV_HEADS = 8
  MODEL_DIMS = 6144
  DIMS_PER_HEAD = 128
  HEADS_SPAN_MODEL = False
  HIDDEN_DIMS = 9216
  VOCAB_SIZE = 200_064
  ROPE_FRACTION = 0.5
  NUM_EXPERTS = 32
  FULL_ATTENTION_ALPHA = 3.5565588200778455
  LIGHTNING_ALPHA = 3.5565588200778455
  FFN_ALPHA = 3.5565588200778455
  ICI_MESH_SHAPE = [1, 8, 1]
  DCN_MESH_SHAPE = [1, 32, 1]
