"""Makes the config of a Task from the attributes of architecture, optimizer and schedule."""

import math
from typing import Any, Literal

import fiddle as fdl
from fiddle import selectors
from flax import linen as nn

from paxlite.core.attribute_kinds import Below1, Count, Function, Run, Shape, Training
from paxlite.core.errors import UserError
from paxlite.core.templates import config, template
from paxlite.experiments.decoding import Decoding
from paxlite.experiments.optimization import Optimization
from paxlite.layers.attention import (
  Attention,
  CombinedQkv,
  DotProductAttention,
  PerDimScale,
  SeparateQkv,
)
from paxlite.layers.attention_kernel import AttentionKernel
from paxlite.layers.embeddings import (
  LearnedPositions,
  LmHead,
  LogitsBias,
  SinusoidalPositions,
  TokenEmbedding,
)
from paxlite.layers.feedforward import FeedForward, GatedFeedForward
from paxlite.layers.language_model import TransformerLm
from paxlite.layers.lora import LORA_VARIABLES, LoraProjection
from paxlite.layers.norms import LayerNorm, RmsNorm
from paxlite.layers.pipeline import PipelinedTransformer
from paxlite.layers.projection import Projection
from paxlite.layers.remat import CheckpointPolicy, keeps_nothing
from paxlite.layers.rotary import Llama3RotaryEmbedding, RotaryEmbedding
from paxlite.layers.transformer import RepeatedTransformer, TransformerBlock, UnrolledTransformer
from paxlite.training.task import Task

Activation = Literal['gelu', 'gelu_exact', 'relu', 'silu']
Norm = Literal['LayerNorm', 'RmsNorm']

_NORMS = {'LayerNorm': LayerNorm, 'RmsNorm': RmsNorm}


class Transformer(Decoding, Optimization):
  """A decoder-only transformer trained with Pax's Adam. Defaults are those of Pax's base class."""

  # Architecture
  NUM_LAYERS: Shape[Count] = 10  # transformer blocks
  NUM_HEADS: Shape[Count] = 16  # heads of attention
  MODEL_DIMS: Shape[Count] = 2048  # width of the activations between blocks
  VOCAB_SIZE: Shape[Count] = 32000  # rows of the embedding
  FPROP_DTYPE: Training[Literal['bfloat16', 'float32', 'float16']] = 'bfloat16'  # of activations
  PACKED_INPUT: Training[bool] = True  # rows hold several texts, which do not see each other
  USE_REPEATED_LAYER: Training[bool] = False  # one compiled block is applied NUM_LAYERS times
  CHECKPOINT_POLICY: Run[CheckpointPolicy] = 'SAVE_NOTHING'  # what is not recomputed
  SEPARATE_EMBEDDING: Shape[bool] = False  # logits have a weight of their own
  TRAINABLE_POSITION_EMB: Shape[bool] = False  # learned embeddings of positions are added
  USE_ROTARY_POSITION_EMB: Function[bool] = False  # queries and keys are rotated by position
  ROPE_THETA: Function[float] = 10_000.0  # base of the wavelengths of that rotation
  ROPE_LAYOUT: Function[Literal['interleaved', 'half']] = 'interleaved'  # pairs that rotate
  ROPE_FACTOR: Function[float] = 1.0  # above 1: Llama 3.1's stretching, with the three values below
  ROPE_LOW_FREQUENCY_FACTOR: Function[float] = 1.0  # longer waves are stretched by ROPE_FACTOR
  ROPE_HIGH_FREQUENCY_FACTOR: Function[float] = 4.0  # shorter waves are kept
  ROPE_ORIGINAL_LENGTH: Function[int] = 8192  # tokens to which these two refer
  # The number of queries that are computed at a time, which saves memory and half of the work.
  # MAX_SEQ_LEN: all. 0: all, but on CPUs a quarter if the sequence has 512 tokens or more.
  ATTENTION_BLOCK_SIZE: Run[int] = 0  # queries per block; 0: the kernel chooses
  USE_FLASH_ATTENTION: Run[bool] = True  # uses fused kernels if there are: cuDNN, splash
  SLIDING_WINDOW: Function[int] = 0  # tokens that a query sees; 0: all previous ones
  USE_BIAS: Shape[bool] = False  # of projections and feed-forward layers
  ACTIVATION_CLS: Function[Activation] = 'relu'  # of the feed-forward layer
  USE_GATED_ACTIVATION: Shape[bool] = False  # the activation is multiplied by a second projection
  NORM_CLS: Function[Norm] = 'RmsNorm'  # the kind of norm
  NORM_POLICY: Function[Literal['pre']] = 'pre'  # norms are before attention and feed-forward
  LAYERNORM_EPSILON: Function[float] = 1e-6  # added to the variance
  SCALE_EMBEDDING: Function[bool] = False  # embeddings × √MODEL_DIMS
  USE_PER_DIM_SCALE: Shape[bool] = False  # learned scales of the dimensions of queries
  USE_SOFTMAX_BIAS: Shape[bool] = False  # a bias is added to the logits
  SOFTMAX_CAP_LOGITS: Function[float] = 30.0  # cap of logits, cap · tanh(logits / cap); 0: off
  ATTEN_LOGIT_CAP: Function[float] = 50.0  # the same for the scores of attention
  DROPOUT_PROB: Training[Below1] = 0.0  # of attention, feed-forward and residual branches
  EMBEDDING_DROPOUT_PROB: Training[Below1] = 0.0  # of the embeddings
  WEIGHT_INIT: Training[Literal['normal', 'xavier_uniform']] = 'normal'  # of initial values
  INIT_STD: Training[float] = 0.02  # standard deviation for 'normal'
  HEADS_SPAN_MODEL: Training[bool] = True  # NUM_HEADS × DIMS_PER_HEAD must equal MODEL_DIMS
  NUM_LOSS_CHUNKS: Run[Count] = 1  # parts of the vocabulary whose logits are held at a time

  # LoRA: trains low-rank factors of the chosen layers' weights, and freezes all other weights
  USE_LORA: Training[bool] = False  # trains low-rank factors alone
  LORA_RANK: Training[Count] = 8  # rank of the factors
  LORA_TARGET_LAYERS: Training[Literal['all', 'attention', 'mlp']] = 'all'  # layers with factors

  # A prompt to continue when training ends, if the dataset has a tokenizer
  SAMPLE_PROMPTS: Run[list[str]] = []  # texts that are continued at each evaluation
  SAMPLE_PROMPT: Run[str | None] = None  # text that is continued after training; None: no sample

  @property
  def HIDDEN_DIMS(self) -> Shape[Count]:
    """The width inside a feed-forward layer."""
    return 4 * self.MODEL_DIMS

  @property
  def DIMS_PER_HEAD(self) -> Shape[Count]:
    """The width of a head of attention."""
    return self.MODEL_DIMS // self.NUM_HEADS

  @property
  def NUM_KV_HEADS(self) -> Shape[Count]:
    """Heads of keys and values, each of which several heads of queries share."""
    return self.NUM_HEADS

  @property
  def USE_FFN_BIAS(self) -> Shape[bool]:
    """Whether feed-forward layers have biases."""
    return self.USE_BIAS

  @property
  def SOFTMAX_INIT_STD(self) -> Training[float]:
    """The standard deviation of initial embeddings and of the weight of the logits."""
    return self.INIT_STD

  @property
  def NORM_SCALE_OFFSET(self) -> Function[float]:
    """The number that is added to the stored scale of a norm."""
    return 1.0 if self.NORM_CLS == 'LayerNorm' else 0.0

  @property
  def blocks_per_layer(self) -> int:
    """The number of blocks in the unit that the stack repeats."""
    return 1

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
  def sample_prompt(self) -> str | None:
    return self.SAMPLE_PROMPT

  @property
  def sample_prompts(self) -> list[str]:
    return self.SAMPLE_PROMPTS

  @property
  def recomputed(self) -> float:
    forward_twice = 4 / 3 if keeps_nothing(self.CHECKPOINT_POLICY) else 1.0
    return forward_twice * (1 + (self.num_stages - 1) / self.NUM_MICROBATCHES)

  @property
  def TRAINABLE_VARIABLES(self) -> Training[list[str]]:
    return [LORA_VARIABLES] if self.USE_LORA else ['.*']

  def validate(self) -> None:
    super().validate()
    heads = f'NUM_HEADS={self.NUM_HEADS} × DIMS_PER_HEAD={self.DIMS_PER_HEAD}'
    if self.HEADS_SPAN_MODEL and self.NUM_HEADS * self.DIMS_PER_HEAD != self.MODEL_DIMS:
      raise UserError(
        f'{heads} is {self.NUM_HEADS * self.DIMS_PER_HEAD}, not MODEL_DIMS={self.MODEL_DIMS}. '
        'If that is meant: --fdl.HEADS_SPAN_MODEL=False'
      )
    if self.NUM_HEADS % self.NUM_KV_HEADS:
      raise UserError(
        f'NUM_HEADS={self.NUM_HEADS} is not divisible by NUM_KV_HEADS={self.NUM_KV_HEADS}'
      )
    block = self.ATTENTION_BLOCK_SIZE
    if block < 0 or (block and self.MAX_SEQ_LEN % block):
      raise UserError(
        f'ATTENTION_BLOCK_SIZE={block} must divide MAX_SEQ_LEN={self.MAX_SEQ_LEN}, or be 0'
      )
    if block and self.mesh_sizes.get('context', 1) > 1:
      raise UserError(
        'ATTENTION_BLOCK_SIZE and the mesh axis context both split queries: choose one'
      )
    if self.USE_ROTARY_POSITION_EMB and self.DIMS_PER_HEAD % 2:
      raise UserError(f'rotary positions need an even DIMS_PER_HEAD, not {self.DIMS_PER_HEAD}')
    if self.ROPE_FACTOR < 1 or not (
      0 < self.ROPE_LOW_FREQUENCY_FACTOR < self.ROPE_HIGH_FREQUENCY_FACTOR
    ):
      raise UserError(
        f'ROPE_FACTOR={self.ROPE_FACTOR:g} must be at least 1, and ROPE_LOW_FREQUENCY_FACTOR='
        f'{self.ROPE_LOW_FREQUENCY_FACTOR:g} positive and below ROPE_HIGH_FREQUENCY_FACTOR='
        f'{self.ROPE_HIGH_FREQUENCY_FACTOR:g}'
      )
    layers, rest = divmod(self.NUM_LAYERS, self.blocks_per_layer)
    if rest:
      raise UserError(
        f'NUM_LAYERS={self.NUM_LAYERS} is not divisible by the {self.blocks_per_layer} blocks that '
        'are repeated together'
      )
    if self.num_stages > 1:
      if layers % self.num_stages:
        raise UserError(
          f'NUM_LAYERS={self.NUM_LAYERS} in {layers} repeated layers is not divisible by the '
          f"mesh's axis stage = {self.num_stages}"
        )
      if not self.USE_REPEATED_LAYER:
        raise UserError('a pipeline (mesh axis stage) needs --fdl.USE_REPEATED_LAYER=True')

  def task(self) -> fdl.Config:
    return config(
      Task,
      model=self.model(),
      optimizer=self.optimizer(),
      num_microbatches=1 if self.num_stages > 1 else self.NUM_MICROBATCHES,
      max_skipped_steps=self.MAX_SKIPPED_STEPS,
    )

  def model(self) -> fdl.Config:
    """Returns the config of the TransformerLm."""
    sizes: dict[str, Any] = dict(
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
    for ffn in selectors.select(lm, FeedForward):
      selectors.select(ffn, Projection).set(use_bias=self.USE_FFN_BIAS)
    if self.USE_LORA:
      self.add_lora(lm)
    return lm

  def add_lora(self, lm: fdl.Config) -> None:
    """Adds low-rank factors to the projections of the targeted layers."""
    layers = {'all': (Attention, FeedForward), 'attention': (Attention,), 'mlp': (FeedForward,)}
    for layer in layers[self.LORA_TARGET_LAYERS]:
      for target in selectors.select(lm, layer):
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
      max_length=self.MAX_SEQ_LEN,
      model_dims=self.MODEL_DIMS,
      dtype=self.FPROP_DTYPE,
      emb_init=fdl.Config(nn.initializers.normal, stddev=self.INIT_STD),
    )

  def norm(self) -> fdl.Partial:
    """Returns a new template of a norm, so that an edit of one norm leaves the others unchanged."""
    return template(
      _NORMS[self.NORM_CLS],
      epsilon=self.LAYERNORM_EPSILON,
      offset=self.NORM_SCALE_OFFSET,
      dtype=self.FPROP_DTYPE,
    )

  def stack(self) -> fdl.Partial:
    """Returns the template of all blocks."""
    layers: dict[str, Any] = dict(
      num_layers=self.NUM_LAYERS // self.blocks_per_layer,
      checkpoint_policy=self.CHECKPOINT_POLICY,
      layer_tpl=self.layer(),
    )
    if self.num_stages > 1 and self.USE_REPEATED_LAYER:
      return template(
        PipelinedTransformer,
        num_stages=self.num_stages,
        num_microbatches=self.NUM_MICROBATCHES,
        **layers,
      )
    return template(
      RepeatedTransformer if self.USE_REPEATED_LAYER else UnrolledTransformer, **layers
    )

  def layer(self) -> fdl.Partial:
    """Returns the template of the unit that the stack repeats: blocks_per_layer blocks."""
    return self.block()

  def block(self) -> fdl.Partial:
    """Returns the template of one block."""
    return template(
      TransformerBlock,
      norm_tpl=self.norm(),
      attention_tpl=self.attention(),
      ffn_tpl=template(
        GatedFeedForward if self.USE_GATED_ACTIVATION else FeedForward,
        model_dims=self.MODEL_DIMS,
        hidden_dims=self.HIDDEN_DIMS,
        activation=self.ACTIVATION_CLS,
        dropout=self.DROPOUT_PROB,
      ),
      dropout=self.DROPOUT_PROB,
    )

  def attention(self) -> fdl.Partial:
    """Returns the template of the attention layer."""
    sizes: dict[str, Any] = dict(
      model_dims=self.MODEL_DIMS, num_heads=self.NUM_HEADS, head_dim=self.DIMS_PER_HEAD
    )
    if self.NUM_KV_HEADS == self.NUM_HEADS:
      qkv = template(CombinedQkv, **sizes)
    else:
      qkv = template(SeparateQkv, num_kv_heads=self.NUM_KV_HEADS, **sizes)
    return template(
      Attention,
      qkv_tpl=qkv,
      query_scale_tpl=template(PerDimScale) if self.USE_PER_DIM_SCALE else None,
      rotary_tpl=self.rotary() if self.USE_ROTARY_POSITION_EMB else None,
      attention_tpl=self.dot_product_attention(),
      **sizes,
    )

  def dot_product_attention(self) -> fdl.Partial:
    """Returns the template of the attention itself, without its projections."""
    return template(
      DotProductAttention,
      query_scale=1 / math.sqrt(self.DIMS_PER_HEAD),
      logit_cap=self.ATTEN_LOGIT_CAP,
      window=self.SLIDING_WINDOW,
      dropout=self.DROPOUT_PROB,
      kernel_tpl=template(
        AttentionKernel,
        block_size=self.ATTENTION_BLOCK_SIZE,
        fused=self.USE_FLASH_ATTENTION,
      ),
    )

  def rotary(self) -> fdl.Partial:
    """Returns the template of the rotary embedding."""
    base: dict[str, Any] = dict(theta=self.ROPE_THETA, layout=self.ROPE_LAYOUT)
    if self.ROPE_FACTOR == 1:
      return template(RotaryEmbedding, **base)
    return template(
      Llama3RotaryEmbedding,
      factor=self.ROPE_FACTOR,
      low_frequency_factor=self.ROPE_LOW_FREQUENCY_FACTOR,
      high_frequency_factor=self.ROPE_HIGH_FREQUENCY_FACTOR,
      original_length=self.ROPE_ORIGINAL_LENGTH,
      **base,
    )

  @property
  def saves_trainable_only(self) -> bool:
    """Whether LoRA's checkpoints hold only its factors, because the base weights are elsewhere."""
    return self.USE_LORA and bool(self.CHECKPOINT_RESTORE_PATH)

  @property
  def decoding_values(self) -> dict[str, Any]:
    """Attributes with which a model of the same variables continues text."""
    return dict(USE_REPEATED_LAYER=False, CHECKPOINT_POLICY='SAVE_EVERYTHING')

  @property
  def matmul_params(self) -> int:
    """The number of weights of the blocks that one token is multiplied with."""
    return self.NUM_LAYERS * (self.attention_params + self.ffn_params)

  @property
  def attention_params(self) -> int:
    """The number of parameters in the matrix multiplications of one attention layer."""
    return 2 * self.MODEL_DIMS * self.DIMS_PER_HEAD * (self.NUM_HEADS + self.NUM_KV_HEADS)

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
    window = min(self.SLIDING_WINDOW or self.MAX_SEQ_LEN, self.MAX_SEQ_LEN)
    keys = window - window**2 / (2 * self.MAX_SEQ_LEN)
    attention = self.NUM_LAYERS * self.NUM_HEADS * self.DIMS_PER_HEAD * keys
    return (4.0 if self.USE_LORA else 6.0) * matmul + 12.0 * attention
