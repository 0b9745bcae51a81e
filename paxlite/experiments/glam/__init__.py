"""GLaM as in Pax, https://arxiv.org/abs/2112.06905: GLaM126M64E, GLaM64B64E, without a dataset."""

import math
from typing import Annotated

import fiddle as fdl
from fiddle import selectors
from flax import linen as nn

from paxlite.config.attribute_kinds import Bounds, Count, Function, Shape
from paxlite.config.templates import template
from paxlite.core.errors import UserError
from paxlite.experiments.glam.layers import RelativeBias
from paxlite.experiments.gpt import GPT126M
from paxlite.experiments.parts.experts import MixtureOfExperts
from paxlite.experiments.parts.stack import Activation
from paxlite.experiments.parts.width_and_norms import Norm
from paxlite.experiments.registry import register
from paxlite.layers.attention.attention import SeparateQkv
from paxlite.layers.embeddings import TokenEmbedding
from paxlite.layers.feedforward import FeedForward
from paxlite.layers.projection import Projection

_FAN_IN = dict(scale=1.0, mode='fan_in', distribution='uniform')


class GLaM(MixtureOfExperts, subject='Relative bias (GLaM)'):
  """GLaM's pairs of blocks: experts w_out·relu(w_in·x), then a GELU-gated feed-forward layer.

  It has RMSNorm, no biases, T5's relative positions, and an embedding tied to the output.
  """

  USE_BIAS = False
  USE_GATED_ACTIVATION = True
  ACTIVATION_CLS: Function[Activation] = 'gelu'
  NORM_CLS: Function[Norm] = 'RmsNorm'
  LAYERNORM_EPSILON = 1e-6
  TRAINABLE_POSITION_EMB = False
  SEPARATE_EMBEDDING = False
  SOFTMAX_CAP_LOGITS = -1.0
  ATTEN_LOGIT_CAP = -1.0
  SOFTMAX_INIT_STD = 1.0
  RELATIVE_BIAS_BUCKETS: Shape[Annotated[int, Bounds('must be at least 2', lowest=2)]] = (
    32  # distance buckets of T5's relative attention bias
  )
  RELATIVE_BIAS_MAX_DISTANCE: Function[Count] = (
    128  # distance from which all positions share one bucket of T5's bias
  )

  def validate(self) -> None:
    super().validate()
    if not self.RELATIVE_BIAS_BUCKETS // 2 < self.RELATIVE_BIAS_MAX_DISTANCE:
      raise UserError(
        f'RELATIVE_BIAS_MAX_DISTANCE={self.RELATIVE_BIAS_MAX_DISTANCE} must be more than half of '
        f'RELATIVE_BIAS_BUCKETS={self.RELATIVE_BIAS_BUCKETS}, which are for one distance each'
      )

  def losses(self) -> dict[str, fdl.Config]:
    losses = super().losses()
    losses['avg_xent'].over_padding = True
    return losses

  def model(self) -> fdl.Config:
    D, N, H = self.MODEL_DIMS, self.NUM_HEADS, self.DIMS_PER_HEAD
    normal = lambda variance: fdl.Config(nn.initializers.normal, stddev=variance**-0.5)
    lm = super().model()
    selectors.select(lm, TokenEmbedding).set(attend_scale=1 / math.sqrt(D))
    selectors.select(lm, Projection).set(w_init=normal(N * H))  # the attention's output projection
    for qkv in selectors.select(lm, SeparateQkv):
      qkv.query_tpl.w_init = normal(D * H)
      qkv.key_value_tpl.w_init = normal(D)
    for ffn in selectors.select(lm, FeedForward, check_nonempty=False):
      ffn.projection_tpl.w_init = fdl.Config(nn.initializers.variance_scaling, **_FAN_IN)
    return lm

  def positions(self) -> None:
    """Returns None, because the attention has relative positions."""

  def attention(self) -> fdl.Partial:
    attention = super().attention()
    attention.qkv_tpl = template(
      SeparateQkv, model_dims=self.MODEL_DIMS, num_heads=self.NUM_HEADS,
      num_kv_heads=self.NUM_KV_HEADS, head_dim=self.DIMS_PER_HEAD,
    )  # fmt: skip
    attention.attention_tpl.query_scale = 1.0
    attention.attention_tpl.sink_logit = 0.0
    attention.attention_tpl.relative_bias_tpl = template(
      RelativeBias, num_heads=self.NUM_HEADS, num_buckets=self.RELATIVE_BIAS_BUCKETS,
      max_distance=self.RELATIVE_BIAS_MAX_DISTANCE,
    )  # fmt: skip
    return attention


@register
class GLaM126M64E(GLaM, GPT126M):
  """1,921,670,400 parameters: GPT126M's sizes, with 64 experts in every second block."""

  ICI_MESH_SHAPE = [1, 64, 1]
  DCN_MESH_SHAPE = [1, 1, 1]


@register
class GLaM64B64E(GLaM126M64E):
  """1,142,891,356,160 parameters in repeated pairs of blocks, for 512 devices.

  Pax states ADAM_BETA1 = 0 for it, which trains with 0.9 there; here it is 0.9.
  """

  NUM_LAYERS = 64
  NUM_HEADS = 64
  DIMS_PER_HEAD = 128
  MODEL_DIMS = 8192
  HIDDEN_DIMS = 32768
  MAX_SEQ_LEN = 1024

  ICI_MESH_SHAPE = [1, 1, 8]
  DCN_MESH_SHAPE = [1, 64, 1]
  USE_REPEATED_LAYER = True
  CHECKPOINT_POLICY = 'SAVE_NOTHING'
  CHECKPOINT_EVERY_N_STEPS = 100
  CHECKPOINT_MAX_TO_KEEP = 2
  SUMMARY_INTERVAL_STEPS = 10

  ADAM_BETA2 = 0.99
  LEARNING_RATE = 2e-5
  LR_COS_WARMUP = 398
  LR_COS_DECAY_END = 162_900
