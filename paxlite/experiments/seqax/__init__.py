"""The sizes that seqax trains on C4, 84M to 2B, without a dataset.

As in seqax, rotary positions rotate pairs (i, i + H/2), and queries are scaled by their initial
values instead of 1/√H. All weights come from a truncated normal of variance 1 / fan-in, and the
embedding from N(0, 1). seqax names a size by its parameters without (part of) the vocabulary; the
counts here are complete.
"""

import math

import fiddle as fdl
from fiddle import selectors
from flax import linen as nn

from paxlite.config.templates import template
from paxlite.experiments.language_model import LanguageModel
from paxlite.experiments.parts.stack import Activation
from paxlite.experiments.registry import register
from paxlite.layers.attention.attention import Attention, DotProductAttention, SeparateQkv
from paxlite.layers.feedforward import FeedForward
from paxlite.layers.projection import Projection


class Seqax(LanguageModel):
  """The architecture of all sizes."""

  NUM_LAYERS = 8
  DIMS_PER_HEAD = 128
  HEADS_SPAN_MODEL = False
  VOCAB_SIZE = 32_768
  MAX_SEQ_LEN = 1024

  PACKED_INPUT = True
  USE_REPEATED_LAYER = True
  SEPARATE_EMBEDDING = True
  USE_ROTARY_POSITION_EMB = True
  ROPE_LAYOUT = 'half'
  ACTIVATION_CLS: Activation = 'silu'
  USE_GATED_ACTIVATION = True
  NORM_CLS = 'RmsNorm'
  LAYERNORM_EPSILON = 1e-6
  SOFTMAX_CAP_LOGITS = -1.0
  ATTEN_LOGIT_CAP = -1.0

  ICI_MESH_SHAPE = [1, 8, 1]
  PERCORE_BATCH_SIZE = 8

  LEARNING_RATE = 3e-4
  ADAM_BETA1 = 0.9
  ADAM_BETA2 = 0.95
  ADAM_EPSILON = 1e-8
  ADAM_CLIP_THRESHOLD = -1.0
  CLIP_GRADIENT_NORM_TO_VALUE = 1.0
  WEIGHT_DECAY = 0.1
  LR_SCHEDULE = 'linear_rampup_cosine_decay'
  LR_COS_MIN_RATIO = 0.1

  @property
  def LR_COS_WARMUP(self) -> int:  # type: ignore[override]
    return self.MAX_STEPS // 10

  @property
  def LR_COS_DECAY_START(self) -> int:
    return self.LR_COS_WARMUP

  @property
  def LR_COS_DECAY_END(self) -> int:  # type: ignore[override]
    return self.MAX_STEPS

  def model(self) -> fdl.Config:
    lm = super().model()
    lm.embedding_tpl.emb_init = fdl.Config(nn.initializers.normal, stddev=1.0)
    if self.SEPARATE_EMBEDDING:
      lm.head_tpl.w_init = _fan_in(self.MODEL_DIMS)
    for attention in selectors.select(lm, Attention):
      attention.qkv_tpl.query_tpl.w_init = _fan_in(self.MODEL_DIMS * self.DIMS_PER_HEAD)
      attention.qkv_tpl.key_value_tpl.w_init = _fan_in(self.MODEL_DIMS)
      attention.post_tpl.w_init = _fan_in(self.NUM_HEADS * self.DIMS_PER_HEAD)
    for ffn in selectors.select(lm, FeedForward):
      ffn.projection_tpl.w_init = fdl.Config(nn.initializers.lecun_normal)
    return lm

  def attention(self) -> fdl.Partial:
    attention = super().attention()
    attention.qkv_tpl = template(
      SeparateQkv, model_dims=self.MODEL_DIMS, num_heads=self.NUM_HEADS,
      num_kv_heads=self.NUM_KV_HEADS, head_dim=self.DIMS_PER_HEAD,
    )  # fmt: skip
    for projection in selectors.select(attention.qkv_tpl, Projection):
      projection.use_bias = self.USE_BIAS
    selectors.select(attention, DotProductAttention).set(query_scale=1.0)
    return attention


# A standard normal that is truncated at ±2 has this standard deviation.
_TRUNCATED_STD = 0.87962566103423978


def _fan_in(size: int) -> fdl.Config:
  """Returns the config of a truncated normal of variance 1 / size."""
  return fdl.Config(nn.initializers.truncated_normal, stddev=1 / math.sqrt(size) / _TRUNCATED_STD)


@register
class Seqax84M(Seqax):
  """100,672,000 parameters."""

  NUM_HEADS = 8
  MODEL_DIMS = 512
  HIDDEN_DIMS = 4096
  LEARNING_RATE = 3e-3
  MAX_STEPS = 26_000
  CHECKPOINT_EVERY_N_STEPS = 2600


@register
class Seqax270M(Seqax):
  """335,561,728 parameters."""

  NUM_HEADS = 16
  MODEL_DIMS = 1024
  HIDDEN_DIMS = 8192
  MAX_STEPS = 92_000
  CHECKPOINT_EVERY_N_STEPS = 9200


@register
class Seqax540M(Seqax):
  """671,123,456 parameters."""

  NUM_HEADS = 16
  MODEL_DIMS = 2048
  HIDDEN_DIMS = 8192
  MAX_STEPS = 185_000
  CHECKPOINT_EVERY_N_STEPS = 4000


@register
class Seqax1B(Seqax540M):
  """1,073,776,640 parameters."""

  HIDDEN_DIMS = 16384
  LEARNING_RATE = 1e-5
  MAX_STEPS = 370_000
  CHECKPOINT_EVERY_N_STEPS = 10_000


@register
class Seqax2B(Seqax1B):
  """2,147,553,280 parameters."""

  MODEL_DIMS = 4096
  MAX_STEPS = 740_000
