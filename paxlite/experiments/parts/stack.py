"""The stack of blocks: how many, of which kinds, repeated or unrolled, in one or several stages."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import fiddle as fdl

from paxlite import extensions
from paxlite.config.attribute_kinds import Count, Function, Run, Shape, Training
from paxlite.config.templates import template
from paxlite.core.errors import UserError
from paxlite.experiments.parts.attention import AttentionKind, AttentionLayers
from paxlite.experiments.parts.memory_savings import MemorySavings
from paxlite.layers.block_sequence import BlockSequence
from paxlite.layers.feedforward import FeedForward, GatedFeedForward
from paxlite.layers.remat import PolicyChoice, keeps_products
from paxlite.layers.transformer import RepeatedTransformer, TransformerBlock, UnrolledTransformer
from paxlite.parallel import devices

Activation = Literal['gelu', 'gelu_exact', 'relu', 'relu2', 'silu', 'clamped_swiglu']
DeviceKind = Literal['cpu', 'gpu', 'tpu']


class BlockKind(NamedTuple):
  """The properties that distinguish a block from the others in its stack."""

  attention: AttentionKind | None  # None: as the other attributes say
  has_experts: bool
  variant: str = ''  # what else distinguishes it, in a family's own words
  number: int | None = None  # in a stack in which no two blocks are alike


class Stack(AttentionLayers, MemorySavings, subject='Stack of layers'):
  """The blocks between embeddings and logits, and their feed-forward layers, gated or not."""

  NUM_LAYERS: Shape[Count] = 10  # transformer blocks
  USE_REPEATED_LAYER: Training[bool] = (
    False  # stacks all layers' weights as [L, …] and loops over layers
  )
  # AUTO is SAVE_NOTHING until a run decides it: see programs/first_start.py
  CHECKPOINT_POLICY: Run[PolicyChoice] = (
    'AUTO'  # activations saved for the backward pass; AUTO: what the devices have memory for
  )
  NUM_PIPELINE_REPEATS: Run[Count] = 1  # virtual stages per pipeline stage
  GATHER_STAGES_ONCE: Run[bool] = (
    True  # gathers a pipeline stage's sharded weights once a step, not every tick
  )

  ACTIVATION_CLS: Function[Activation] = 'relu'  # feed-forward activation
  USE_GATED_ACTIVATION: Shape[bool] = (
    False  # gated feed-forward layers: a second projection multiplies the activation
  )

  @property
  def HIDDEN_DIMS(self) -> Shape[Count]:
    """Feed-forward width."""
    return 4 * self.MODEL_DIMS

  @property
  def USE_FFN_BIAS(self) -> Shape[bool]:
    """Feed-forward biases."""
    return self.USE_BIAS

  @property
  def UNROLL_LAYERS(self) -> Run[list[DeviceKind]]:
    """Device kinds that compile repeated layers one by one, without a loop.

    By default these are GPUs, for dense layers that keep their products on a mesh of data and
    replica. There, steps take less time without the loop, and most of them less memory.
    """
    is_kept = keeps_products(self.CHECKPOINT_POLICY) and not self.OFFLOAD_ACTIVATIONS
    return ['gpu'] if is_kept and self.is_dense_and_data_parallel else []

  @property
  def blocks_per_layer(self) -> int:
    """The number of blocks in the unit that the stack repeats: the period of all patterns."""
    return max(len(self.ATTENTION_PATTERN), 1)

  @property
  def num_first_blocks(self) -> int:
    """The number of blocks before the first unit that the stack repeats."""
    return 0

  @property
  def block_kinds(self) -> list[BlockKind]:
    """The kind of each block."""
    pattern: Sequence[AttentionKind | None] = self.ATTENTION_PATTERN or [None]
    return [
      BlockKind(pattern[i % len(pattern)], self.has_experts(i)) for i in range(self.NUM_LAYERS)
    ]

  def has_experts(self, block: int) -> bool:
    """Returns whether the feed-forward layer of a block has experts."""
    return False

  def hidden_dims_of(self, kind: BlockKind) -> int:
    """Returns the width inside the feed-forward layer of a block, if it is dense."""
    return self.HIDDEN_DIMS

  def norm_policy_of(self, kind: BlockKind) -> str:
    """Returns the NORM_POLICY of a block."""
    return self.NORM_POLICY

  @property
  def has_plain_blocks(self) -> bool:
    """Whether a block adds two layers to its activations in turn, each after a norm."""
    return self.NORM_POLICY == 'pre'

  @property
  def takes_modules(self) -> bool:
    """Whether modules behind the stack can read what its last block returns."""
    return True

  @property
  def has_any_experts(self) -> bool:
    """Whether any block has experts."""
    return any(map(self.has_experts, range(self.NUM_LAYERS)))

  @property
  def is_dense_and_data_parallel(self) -> bool:
    """Whether no block has experts, and the mesh has no axis but replica and data."""
    others = (n for axis, n in self.mesh_sizes.items() if axis not in ('replica', 'data'))
    return not self.has_any_experts and all(n == 1 for n in others)

  def has_loop(self, platform: str) -> bool:
    """Returns whether a step for a platform has a loop over its layers."""
    return self.USE_REPEATED_LAYER and devices.kind(platform) not in self.UNROLL_LAYERS

  def scatters_each_gradient(self, platform: str) -> bool:
    return self.is_dense_and_data_parallel and not self.has_loop(platform)

  @property
  def has_repeated_stack(self) -> bool:
    return self.USE_REPEATED_LAYER

  @property
  def block_names(self) -> list[str]:
    """The name of each block in the variables of an unrolled stack: 'x_layers_0' …"""
    first, period = min(self.num_first_blocks, self.NUM_LAYERS), self.blocks_per_layer
    layers, last = divmod(self.NUM_LAYERS - first, period)
    within = [''] if period == 1 else [f'/x_layers_{j}' for j in range(period)]
    return [
      *(f'first_{i}' for i in range(first)),
      *(f'x_layers_{i}{name}' for i in range(layers) for name in within),
      *(f'last_{i}' for i in range(last)),
    ]

  def validate(self) -> None:
    super().validate()
    if (self.ACTIVATION_CLS == 'clamped_swiglu') > self.USE_GATED_ACTIVATION:
      raise UserError('ACTIVATION_CLS=clamped_swiglu needs USE_GATED_ACTIVATION=True')
    if self.num_stages > 1:
      layers, rest = divmod(self.NUM_LAYERS - self.num_first_blocks, self.blocks_per_layer)
      if rest or self.num_first_blocks or layers % self.num_stages:
        raise UserError(
          f'NUM_LAYERS={self.NUM_LAYERS} in {layers} repeated layers is not divisible by the '
          f"mesh's axis stage = {self.num_stages}"
        )
      if layers // self.num_stages % self.NUM_PIPELINE_REPEATS:
        raise UserError(
          f'NUM_PIPELINE_REPEATS={self.NUM_PIPELINE_REPEATS} does not divide the '
          f'{layers // self.num_stages} repeated layers of a stage'
        )
      if not self.USE_REPEATED_LAYER:
        raise UserError('a pipeline (mesh axis stage) needs USE_REPEATED_LAYER=True')
      if self.UNROLL_LAYERS:
        raise UserError("a pipeline (mesh axis stage) needs 'UNROLL_LAYERS=[]'")

  def feed_forward(self, hidden_dims: int) -> fdl.Partial:
    """Returns the template of a feed-forward layer."""
    return template(
      GatedFeedForward if self.USE_GATED_ACTIVATION else FeedForward, model_dims=self.MODEL_DIMS,
      hidden_dims=hidden_dims, activation=self.ACTIVATION_CLS, dropout=self.DROPOUT_PROB,
    )  # fmt: skip

  @property
  def ffn_params(self) -> int:
    """The number of parameters in the matrix multiplications of one feed-forward layer."""
    return (3 if self.USE_GATED_ACTIVATION else 2) * self.MODEL_DIMS * self.HIDDEN_DIMS

  def stack(self) -> fdl.Partial:
    """Returns the template of all blocks."""
    first = min(self.num_first_blocks, self.NUM_LAYERS)
    kinds, period = self.block_kinds, self.blocks_per_layer
    num_layers = (self.NUM_LAYERS - first) // period
    last = first + num_layers * period
    layers: dict[str, object] = dict(
      num_layers=num_layers, checkpoint_policy=self.kept_activations(self.CHECKPOINT_POLICY),
      layer_tpl=self.layer(), first_tpls=[self.block_of(kind) for kind in kinds[:first]],
      last_tpls=[self.block_of(kind) for kind in kinds[last:]],
    )  # fmt: skip
    if self.num_stages > 1 and self.USE_REPEATED_LAYER:
      return template(
        extensions.hook('the mesh axis stage'), num_stages=self.num_stages,
        num_microbatches=self.NUM_MICROBATCHES, num_repeats=self.NUM_PIPELINE_REPEATS,
        gathers_once=self.GATHER_STAGES_ONCE, **layers,
      )  # fmt: skip
    if self.USE_REPEATED_LAYER and num_layers > 0:
      return template(RepeatedTransformer, unrolled_on=self.UNROLL_LAYERS, **layers)
    return template(UnrolledTransformer, **layers)

  def layer(self) -> fdl.Partial:
    """Returns the template of the unit that the stack repeats: blocks_per_layer blocks."""
    first, period = self.num_first_blocks, self.blocks_per_layer
    kinds = self.block_kinds[first : first + period] or [self.block_kinds[0]]
    blocks = [self.block_of(kind) for kind in kinds]
    return blocks[0] if period == 1 else template(BlockSequence, block_tpls=blocks)

  def block_of(self, kind: BlockKind) -> fdl.Partial:
    """Returns the template of a block of a kind."""
    block = self.block()
    if kind.attention in self.state_kinds:
      block.attention_tpl = self.attention_with_state(kind.attention)
      return block
    attention = block.attention_tpl
    if kind.attention == 'sliding' and attention.rotary_tpl is not None:
      attention.rotary_tpl = self.rotary(is_local=True)
    if kind.attention in ('full', 'full_nope'):
      attention.attention_tpl.window = 0
    if kind.attention in ('full_nope', 'sliding_nope'):
      attention.rotary_tpl = None
    return block

  def block(self) -> fdl.Partial:
    """Returns the template of one block, as attributes for all blocks describe it."""
    return template(
      TransformerBlock, norm_tpl=None if self.NORM_POLICY == 'post' else self.norm(),
      post_norm_tpl=None if self.NORM_POLICY == 'pre' else self.norm(),
      attention_tpl=self.attention(), ffn_tpl=self.feed_forward(self.HIDDEN_DIMS),
      dropout=self.DROPOUT_PROB,
    )  # fmt: skip

  @property
  def decoding_values(self) -> dict[str, object]:
    """Attributes with which a model of the same variables, in another order, continues text."""
    return dict(
      USE_REPEATED_LAYER=False, CHECKPOINT_POLICY='SAVE_EVERYTHING', OFFLOAD_ACTIVATIONS=[]
    ) | self.generating_values  # fmt: skip

  @property
  def generating_values(self) -> dict[str, object]:
    """Attributes that make a text independent of others in its batch."""
    return {}

  @property
  def matmul_params(self) -> int:
    """The number of weights of the blocks that one token is multiplied with."""
    return sum(map(self.block_params, self.block_kinds))

  @property
  def active_experts(self) -> float:
    """The share of a block's experts that one token is multiplied with."""
    return 1.0

  def block_params(self, kind: BlockKind) -> int:
    """Returns the number of weights of a block that one token is multiplied with."""
    return self.attention_params_of(kind.attention) + self.ffn_params
