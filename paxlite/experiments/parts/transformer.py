"""Makes the config of a Task from the attributes of architecture, optimizer and schedule."""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import fiddle as fdl
from fiddle import selectors
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
from paxlite.config.templates import config, template
from paxlite.core.errors import UserError
from paxlite.core.variable_names import LORA_VARIABLES
from paxlite.experiments import effects
from paxlite.experiments.parts.attention import AttentionKind
from paxlite.experiments.parts.context_parallelism import ContextParallelism
from paxlite.experiments.parts.decoding import Decoding
from paxlite.experiments.parts.objective import Objective
from paxlite.layers.attention.attention import Attention
from paxlite.layers.attention.latent_attention import LatentAttention
from paxlite.layers.block_sequence import BlockSequence
from paxlite.layers.embeddings import (
  LearnedPositions,
  LmHead,
  LogitsBias,
  SinusoidalPositions,
  TokenEmbedding,
)
from paxlite.layers.feedforward import FeedForward, GatedFeedForward
from paxlite.layers.language_model import TransformerLm
from paxlite.layers.lora import LoraProjection
from paxlite.layers.pipeline.pipeline import PipelinedTransformer
from paxlite.layers.projection import Projection
from paxlite.layers.remat import CheckpointPolicy, keeps_products
from paxlite.layers.transformer import RepeatedTransformer, TransformerBlock, UnrolledTransformer
from paxlite.parallel import devices
from paxlite.training.task import Task

DeviceKind = Literal['cpu', 'gpu', 'tpu']
Activation = Literal['gelu', 'gelu_exact', 'relu', 'silu', 'clamped_swiglu']


class BlockKind(NamedTuple):
  """What distinguishes a block from the other blocks of its stack."""

  attention: AttentionKind | None  # None: as the other attributes say
  has_experts: bool


class Transformer(ContextParallelism, Decoding, Objective):
  """A decoder-only transformer trained with Pax's Adam. Defaults are those of Pax's base class."""

  # Architecture
  NUM_LAYERS: Shape[Count] = 10  # transformer blocks
  VOCAB_SIZE: Shape[Count] = 32000  # rows of the embedding
  PACKED_INPUT: Training[bool] = True  # rows hold several texts, which do not see each other
  USE_REPEATED_LAYER: Training[bool] = False  # layers share arrays [L, …]; see UNROLL_LAYERS
  NUM_PIPELINE_REPEATS: Run[Count] = 1  # groups of layers in a stage of a pipeline
  GATHER_STAGES_ONCE: Run[bool] = True  # a pipeline gathers weights once a step, not once a tick
  CHECKPOINT_POLICY: Run[CheckpointPolicy] = 'SAVE_NOTHING'  # what is not recomputed
  SEPARATE_EMBEDDING: Shape[bool] = False  # logits have a weight of their own
  ACTIVATION_CLS: Function[Activation] = 'relu'  # of the feed-forward layer
  USE_GATED_ACTIVATION: Shape[bool] = False  # the activation is multiplied by a second projection
  SCALE_EMBEDDING: Function[bool] = False  # embeddings × √MODEL_DIMS
  USE_SOFTMAX_BIAS: Shape[bool] = False  # a bias is added to the logits
  SOFTMAX_CAP_LOGITS: Function[float] = 30.0  # cap of logits, cap · tanh(logits / cap); ≤ 0: off
  EMBEDDING_DROPOUT_PROB: Training[Below1] = 0.0  # of the embeddings
  WEIGHT_INIT: Training[Literal['normal', 'xavier_uniform']] = 'normal'  # of initial values
  INIT_STD: Training[NotNegative] = 0.02  # standard deviation for 'normal'
  NUM_LOSS_CHUNKS: Run[Count] = 1  # parts of the vocabulary whose logits are held at a time

  # LoRA: trains low-rank factors of the chosen layers' weights, and freezes all other weights
  USE_LORA: Training[bool] = False  # trains low-rank factors alone
  LORA_RANK: Training[Count] = 8  # rank of the factors
  LORA_TARGET_LAYERS: Training[Literal['all', 'attention', 'mlp']] = 'all'  # layers with factors

  # A prompt to continue when training ends, if the dataset has a tokenizer
  SAMPLE_PROMPTS: Run[list[str]] = []  # texts that are continued at each evaluation
  SAMPLE_CHAT: Run[bool | None] = None  # the model answers prompts; None: if it learns chats
  SAMPLE_PROMPT: Run[str | None] = None  # text that is continued after training; None: no sample

  @property
  def UNROLL_LAYERS(self) -> Run[list[DeviceKind]]:
    """The kinds of devices on which repeated layers are compiled one by one, without a loop.

    By default these are GPUs, for dense layers that keep their products on a mesh of data and
    replica. There, steps take less time without the loop, and most of them less memory.
    """
    is_kept = keeps_products(self.CHECKPOINT_POLICY) and not self.OFFLOAD_ACTIVATIONS
    return ['gpu'] if is_kept and self.is_dense_and_data_parallel else []

  @property
  def HIDDEN_DIMS(self) -> Shape[Count]:
    """The width inside a feed-forward layer."""
    return 4 * self.MODEL_DIMS

  @property
  def USE_FFN_BIAS(self) -> Shape[bool]:
    """Whether feed-forward layers have biases."""
    return self.USE_BIAS

  @property
  def SOFTMAX_INIT_STD(self) -> Training[NotNegative]:
    """The standard deviation of initial embeddings and of the weight of the logits."""
    return self.INIT_STD

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

  @property
  def num_stages(self) -> int:
    """The number of pipeline stages, which is the size of the mesh axis stage."""
    return self.mesh_sizes.get('stage', 1)

  @property
  def vocab_size(self) -> int | None:
    return self.VOCAB_SIZE

  @property
  def packed(self) -> bool:
    return self.PACKED_INPUT

  @property
  def TRAINABLE_VARIABLES(self) -> Training[list[str]]:
    return [LORA_VARIABLES] if self.USE_LORA else ['.*']

  @property
  def remarks(self) -> list[str]:
    return [*super().remarks, *effects.remarks(self, self.unread_by_optimizer)]

  def validate(self) -> None:
    super().validate()
    if self.START_ID is not None and self.START_ID >= self.VOCAB_SIZE:
      raise UserError(
        f'START_ID={self.START_ID} is no token id: VOCAB_SIZE={self.VOCAB_SIZE} ids begin with 0'
      )
    if (self.ACTIVATION_CLS == 'clamped_swiglu') > self.USE_GATED_ACTIVATION:
      raise UserError('ACTIVATION_CLS=clamped_swiglu needs --fdl.USE_GATED_ACTIVATION=True')
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
        raise UserError('a pipeline (mesh axis stage) needs --fdl.USE_REPEATED_LAYER=True')
      if self.UNROLL_LAYERS:
        raise UserError("a pipeline (mesh axis stage) needs '--fdl.UNROLL_LAYERS=[]'")

  def task(self) -> fdl.Config:
    return config(
      Task,
      model=self.model(),
      optimizer=self.optimizer(),
      losses=self.losses(),
      reference=self.reference(),
      num_microbatches=1 if self.num_stages > 1 else self.NUM_MICROBATCHES,
      rows_per_example=self.ROWS_PER_EXAMPLE,
      max_skipped_steps=self.MAX_SKIPPED_STEPS,
      gradient_dtype=self.GRADIENT_DTYPE,
      frozen_dtype=self.FROZEN_DTYPE,
    )

  def model(self) -> fdl.Config:
    """Returns the config of the TransformerLm."""
    sizes: dict[str, object] = dict(
      vocab_size=self.VOCAB_SIZE, model_dims=self.MODEL_DIMS, dtype=self.FPROP_DTYPE
    )
    embedding = template(
      TokenEmbedding,
      emb_init=self.weight_init(self.SOFTMAX_INIT_STD),
      lookup_scale=math.sqrt(self.MODEL_DIMS) if self.SCALE_EMBEDDING else 1.0,
      **sizes,
    )
    head = template(LmHead, w_init=self.weight_init(self.SOFTMAX_INIT_STD), **sizes)
    bias = template(LogitsBias, vocab_size=self.VOCAB_SIZE)
    lm = config(
      TransformerLm,
      embedding_tpl=embedding,
      position_tpl=self.positions(),
      transformer_tpl=self.stack(),
      norm_tpl=self.norm(),
      head_tpl=head if self.SEPARATE_EMBEDDING else None,
      logits_bias_tpl=bias if self.USE_SOFTMAX_BIAS else None,
      logit_cap=self.SOFTMAX_CAP_LOGITS,
      embedding_dropout=self.EMBEDDING_DROPOUT_PROB,
      num_loss_chunks=self.NUM_LOSS_CHUNKS,
    )
    selectors.select(lm, Projection).set(
      use_bias=self.USE_BIAS, dtype=self.FPROP_DTYPE, w_init=self.weight_init(self.INIT_STD)
    )
    for ffn in selectors.select(lm, FeedForward, check_nonempty=False):
      selectors.select(ffn, Projection).set(use_bias=self.USE_FFN_BIAS)
    if self.USE_QKV_BIAS != self.USE_BIAS:
      for attention in selectors.select(lm, Attention, check_nonempty=False):
        selectors.select(attention.qkv_tpl, Projection).set(use_bias=self.USE_QKV_BIAS)
    if self.USE_LORA:
      self.add_lora(lm)
    return lm

  def add_lora(self, lm: fdl.Config) -> None:
    """Adds low-rank factors to the projections of the targeted layers."""
    attention, mlp = (Attention, LatentAttention), (FeedForward,)
    layers = {'all': (*attention, *mlp), 'attention': attention, 'mlp': mlp}
    for layer in layers[self.LORA_TARGET_LAYERS]:
      for target in selectors.select(lm, layer, check_nonempty=False):
        for projection in selectors.select(target, Projection):
          fdl.update_callable(projection, LoraProjection)
          projection.rank = self.LORA_RANK

  def weight_init(self, std: float) -> fdl.Config:
    """Returns the initializer of weight matrices; `std` is the standard deviation of 'normal'."""
    if self.WEIGHT_INIT == 'xavier_uniform':
      return fdl.Config(nn.initializers.xavier_uniform)
    return fdl.Config(nn.initializers.normal, stddev=std)

  def positions(self) -> fdl.Partial | None:
    """Returns the template of the position embedding, or None if positions are rotary."""
    if self.USE_ROTARY_POSITION_EMB:
      return None
    if not self.TRAINABLE_POSITION_EMB:
      return template(SinusoidalPositions, model_dims=self.MODEL_DIMS, dtype=self.FPROP_DTYPE)
    return template(
      LearnedPositions,
      max_length=self.MAX_POSITION_EMBEDDINGS,
      model_dims=self.MODEL_DIMS,
      dtype=self.FPROP_DTYPE,
      emb_init=fdl.Config(nn.initializers.normal, stddev=self.INIT_STD),
    )

  def stack(self) -> fdl.Partial:
    """Returns the template of all blocks."""
    first = min(self.num_first_blocks, self.NUM_LAYERS)
    kinds, period = self.block_kinds, self.blocks_per_layer
    num_layers = (self.NUM_LAYERS - first) // period
    last = first + num_layers * period
    layers: dict[str, object] = dict(
      num_layers=num_layers,
      checkpoint_policy=self.kept_activations(self.CHECKPOINT_POLICY),
      layer_tpl=self.layer(),
      first_tpls=[self.block_of(kind) for kind in kinds[:first]],
      last_tpls=[self.block_of(kind) for kind in kinds[last:]],
    )
    if self.num_stages > 1 and self.USE_REPEATED_LAYER:
      return template(
        PipelinedTransformer,
        num_stages=self.num_stages,
        num_microbatches=self.NUM_MICROBATCHES,
        num_repeats=self.NUM_PIPELINE_REPEATS,
        gathers_once=self.GATHER_STAGES_ONCE,
        **layers,
      )
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
    attention = block.attention_tpl
    if kind.attention == 'sliding' and attention.rotary_tpl is not None:
      attention.rotary_tpl = self.rotary(is_local=True)
    if kind.attention in ('full', 'full_nope'):
      attention.attention_tpl.window = 0
    if kind.attention == 'full_nope':
      attention.rotary_tpl = None
    return block

  def block(self) -> fdl.Partial:
    """Returns the template of one block, as attributes for all blocks describe it."""
    return template(
      TransformerBlock,
      norm_tpl=None if self.NORM_POLICY == 'post' else self.norm(),
      post_norm_tpl=None if self.NORM_POLICY == 'pre' else self.norm(),
      attention_tpl=self.attention(),
      ffn_tpl=self.feed_forward(self.HIDDEN_DIMS),
      dropout=self.DROPOUT_PROB,
    )

  def feed_forward(self, hidden_dims: int) -> fdl.Partial:
    """Returns the template of a feed-forward layer."""
    return template(
      GatedFeedForward if self.USE_GATED_ACTIVATION else FeedForward,
      model_dims=self.MODEL_DIMS,
      hidden_dims=hidden_dims,
      activation=self.ACTIVATION_CLS,
      dropout=self.DROPOUT_PROB,
    )

  @property
  def decoding_values(self) -> dict[str, object]:
    """Attributes with which a model of the same variables continues text."""
    return dict(
      USE_REPEATED_LAYER=False, CHECKPOINT_POLICY='SAVE_EVERYTHING', OFFLOAD_ACTIVATIONS=[]
    )

  @property
  def matmul_params(self) -> int:
    """The number of weights of the blocks that one token is multiplied with."""
    return self.NUM_LAYERS * (self.attention_params + self.ffn_params)

  @property
  def ffn_params(self) -> int:
    """The number of parameters in the matrix multiplications of one feed-forward layer."""
    return (3 if self.USE_GATED_ACTIVATION else 2) * self.MODEL_DIMS * self.HIDDEN_DIMS

  @property
  def flops_per_token(self) -> float:
    """Model FLOPs of training per token, with causal attention.

    6 · (parameters in matrix multiplications, the vocabulary's included) + 12 · L·N·H·S, where S is
    the mean number of keys that a query sees: T / 2, or less with a sliding window. Frozen weights
    need no gradient, so LoRA has 4 instead of 6; its own factors are not counted.
    """
    matmul = self.matmul_params + self.VOCAB_SIZE * self.MODEL_DIMS
    attention = 0.0
    for kind in self.block_kinds:
      is_local = kind.attention in (None, 'sliding') and self.SLIDING_WINDOW > 0
      window = min(self.SLIDING_WINDOW if is_local else self.MAX_SEQ_LEN, self.MAX_SEQ_LEN)
      keys = window - window**2 / (2 * self.MAX_SEQ_LEN)
      attention += self.attention_dims * keys
    return (4.0 if self.USE_LORA else 6.0) * matmul + 12.0 * attention
