"""DeepSeek-V2, V3, Kimi K2 and Mistral 4: latent attention, and experts chosen from groups."""

import math

import fiddle as fdl

from paxlite.config.attribute_kinds import Count, Function, Shape
from paxlite.config.templates import template
from paxlite.core.errors import UserError
from paxlite.experiments.deepseek.layers import LatentAttention
from paxlite.experiments.llama import LLaMA
from paxlite.experiments.parts.attention_temperature import AttentionTemperature
from paxlite.experiments.parts.experts import GatedExperts, Router
from paxlite.experiments.parts.latent_queries import QueryLatents
from paxlite.experiments.parts.partial_positions import PartialPositions
from paxlite.experiments.parts.positions import RopeScaling
from paxlite.experiments.parts.prediction import MultiTokenPrediction
from paxlite.experiments.parts.stack import BlockKind
from paxlite.experiments.registry import register


class DeepSeek(
  MultiTokenPrediction, QueryLatents, GatedExperts, LLaMA, subject='Latent attention (DeepSeek)'
):
  """The architecture of both; DIMS_PER_HEAD is the part of queries and keys that is not rotated."""

  LATENT_DIMS: Shape[Count] = 512  # width of the key-value latent
  ROTARY_DIMS_PER_HEAD: Shape[Count] = 64  # rotated width of a query or key head
  VALUE_DIMS_PER_HEAD: Shape[Count] = 128  # width of a value head
  # YaRN's scale of the scores of attention, with and without that of rotated queries and keys
  ROPE_MSCALE: Function[float] = 1.0  # YaRN's mscale, relative to ROPE_MSCALE_ALL_DIM
  ROPE_MSCALE_ALL_DIM: Function[float] = 1.0  # YaRN's mscale of all attention scores; 0: off

  DIMS_PER_HEAD = 128
  HEADS_SPAN_MODEL = False
  LAYERNORM_EPSILON = 1e-6
  ROPE_SCALING: RopeScaling = 'yarn'
  ROPE_FACTOR = 40.0
  ROPE_ORIGINAL_LENGTH = 4096

  NUM_DENSE_BLOCKS = 1

  def validate(self) -> None:
    super().validate()
    if isinstance(self, PartialPositions) and self.ROPE_FRACTION != 1:
      raise UserError(
        f'ROPE_FRACTION={self.ROPE_FRACTION:g} must be 1: ROTARY_DIMS_PER_HEAD is what rotates'
      )

  @property
  def rotary_length(self) -> float:
    if not (self.ROPE_MSCALE and self.ROPE_MSCALE_ALL_DIM):
      return super().rotary_length
    return self._mscale(self.ROPE_MSCALE) / self._mscale(self.ROPE_MSCALE_ALL_DIM)

  @property
  def attention_scale(self) -> float:
    width = self.DIMS_PER_HEAD + self.ROTARY_DIMS_PER_HEAD
    return self._mscale(self.ROPE_MSCALE_ALL_DIM) ** 2 / math.sqrt(width)

  def _mscale(self, mscale: float) -> float:
    if self.ROPE_SCALING != 'yarn':
      return 1.0
    return 0.1 * mscale * math.log(self.ROPE_FACTOR) + 1.0

  @property
  def prediction_kind(self) -> BlockKind:
    return BlockKind(None, has_experts=True)  # also where all blocks of the stack are dense

  @property
  def head_widths(self) -> tuple[int, int]:
    return self.DIMS_PER_HEAD + self.ROTARY_DIMS_PER_HEAD, self.VALUE_DIMS_PER_HEAD

  @property
  def rotary_dims(self) -> int:
    return self.ROTARY_DIMS_PER_HEAD

  def attention(self) -> fdl.Partial:
    sizes: dict[str, object] = dict(
      model_dims=self.MODEL_DIMS, num_heads=self.NUM_HEADS, latent_dims=self.LATENT_DIMS,
      query_latent_dims=self.QUERY_LATENT_DIMS, plain_dims=self.DIMS_PER_HEAD,
      rotary_dims=self.ROTARY_DIMS_PER_HEAD, value_dims=self.VALUE_DIMS_PER_HEAD,
    )  # fmt: skip
    norm = self.norm()
    norm.epsilon = 1e-6  # whatever that of the other norms is
    return template(
      LatentAttention, norm_tpl=norm, rotary_tpl=self.rotary(),
      attention_tpl=self.dot_product_attention(), **sizes | self.further_steps(),
    )  # fmt: skip

  @property
  def attention_classes(self) -> tuple[type, ...]:
    return (*super().attention_classes, LatentAttention)

  @property
  def attention_params(self) -> int:
    D, N, R, Q = self.MODEL_DIMS, self.NUM_HEADS, self.LATENT_DIMS, self.QUERY_LATENT_DIMS
    key, value = self.DIMS_PER_HEAD + self.ROTARY_DIMS_PER_HEAD, self.VALUE_DIMS_PER_HEAD
    query = Q * (D + N * key) if Q else D * N * key
    latent = D * (R + self.ROTARY_DIMS_PER_HEAD) + R * N * (self.DIMS_PER_HEAD + value)
    return query + latent + N * value * D

  @property
  def attention_dims(self) -> float:
    key = self.DIMS_PER_HEAD + self.ROTARY_DIMS_PER_HEAD
    return self.NUM_HEADS * (key + self.VALUE_DIMS_PER_HEAD) / 2


class DeepSeekV2(DeepSeek):
  """DeepSeek-V2: latent attention, and experts in groups that a softmax chooses."""

  ROUTER: Router = 'group_top_k'
  NORMALIZE_EXPERT_WEIGHTS = False
  ROPE_MSCALE = 0.707
  ROPE_MSCALE_ALL_DIM = 0.707


class DeepSeekV3(DeepSeek):
  """DeepSeek-V3 and Kimi K2: experts are chosen by sigmoids and a bias that balances their load."""

  ROUTER: Router = 'balanced'
  NUM_EXPERT_GROUPS = 8
  NUM_EXPERT_GROUPS_PER_TOKEN = 4
  EXPERT_WEIGHT_SCALE = 2.5
  QUERY_LATENT_DIMS = 1536
  NUM_SHARED_EXPERTS = 1
  AUX_LOSS_COEF = 0.0001


class Mistral4(AttentionTemperature, DeepSeek):
  """Mistral Small 4: experts by a softmax, and queries that grow with their positions."""

  VOCAB_SIZE = 131_072
  DIMS_PER_HEAD = 64
  LATENT_DIMS = 256
  QUERY_LATENT_DIMS = 1024
  ROPE_FACTOR = 128.0
  ROPE_ORIGINAL_LENGTH = 8192
  ATTENTION_TEMPERATURE_SCALE = 0.1
  ROUTER: Router = 'group_top_k'
  BEST_PER_EXPERT_GROUP = 2
  NUM_DENSE_BLOCKS = 0
  NUM_SHARED_EXPERTS = 1


@register
class DeepSeekV2_Lite(DeepSeekV2):
  """15,706,484,224 parameters: DeepSeek-V2-Lite; a token uses 2.7 billion of them."""

  NUM_LAYERS = 27
  NUM_HEADS = 16
  MODEL_DIMS = 2048
  HIDDEN_DIMS = 10944
  VOCAB_SIZE = 102_400
  MAX_SEQ_LEN = 4096
  NUM_EXPERTS = 64
  NUM_EXPERTS_PER_TOKEN = 6
  NUM_SHARED_EXPERTS = 2
  EXPERT_HIDDEN_DIMS = 1408

  ICI_MESH_SHAPE = [1, 8, 1]


@register
class DeepSeekV3_671B(DeepSeekV3):
  """671,026,419,200 parameters: DeepSeek-V3 and R1, without their NUM_PREDICTION_MODULES=1."""

  NUM_LAYERS = 61
  NUM_HEADS = 128
  MODEL_DIMS = 7168
  HIDDEN_DIMS = 18432
  VOCAB_SIZE = 129_280
  MAX_SEQ_LEN = 4096
  NUM_DENSE_BLOCKS = 3
  NUM_EXPERTS = 256
  NUM_EXPERTS_PER_TOKEN = 8
  EXPERT_HIDDEN_DIMS = 2048

  ICI_MESH_SHAPE = [1, 8, 1]
  DCN_MESH_SHAPE = [1, 64, 1]


@register
class KimiK2_1T(DeepSeekV3):
  """1,026,408,232,448 parameters: Kimi-K2-Base and -Instruct; a token uses 32 billion of them."""

  NUM_LAYERS = 61
  NUM_HEADS = 64
  MODEL_DIMS = 7168
  HIDDEN_DIMS = 18432
  VOCAB_SIZE = 163_840
  MAX_SEQ_LEN = 4096
  ROPE_THETA = 50_000.0
  ROPE_FACTOR = 32.0
  ROPE_BETA_FAST = 1.0
  NUM_EXPERTS = 384
  NUM_EXPERTS_PER_TOKEN = 8
  NUM_EXPERT_GROUPS = 1
  NUM_EXPERT_GROUPS_PER_TOKEN = 1
  EXPERT_WEIGHT_SCALE = 2.827
  EXPERT_HIDDEN_DIMS = 2048

  ICI_MESH_SHAPE = [1, 8, 1]
  DCN_MESH_SHAPE = [1, 64, 1]


@register
class Mistral4_119B(Mistral4):
  """118,972,826,624 parameters: Mistral-Small-4-119B-2603; a token uses 6.6 billion of them."""

  NUM_LAYERS = 36
  NUM_HEADS = 32
  MODEL_DIMS = 4096
  HIDDEN_DIMS = 12288
  MAX_SEQ_LEN = 8192
  NUM_EXPERTS = 128
  NUM_EXPERTS_PER_TOKEN = 4
  EXPERT_HIDDEN_DIMS = 2048

  ICI_MESH_SHAPE = [1, 8, 1]
  DCN_MESH_SHAPE = [1, 8, 1]
