"""Qwen2, Qwen2.5, Qwen3 and Qwen3's mixtures of experts, without a dataset."""

from paxlite.experiments.llama import LLaMA
from paxlite.experiments.parts.attention import QkNorm
from paxlite.experiments.parts.experts import GatedExperts
from paxlite.experiments.registry import register


class Qwen2(LLaMA):
  """The architecture of Qwen2 and Qwen2.5: LLaMA's, with biases of queries, keys and values."""

  VOCAB_SIZE = 151_936
  ROPE_THETA = 1e6
  ROPE_LAYOUT = 'half'
  LAYERNORM_EPSILON = 1e-6
  USE_QKV_BIAS = True


class Qwen3(LLaMA):
  """The architecture of Qwen3: LLaMA's, with norms of queries and keys within each head."""

  VOCAB_SIZE = 151_936
  DIMS_PER_HEAD = 128
  HEADS_SPAN_MODEL = False
  ROPE_THETA = 1e6
  ROPE_LAYOUT = 'half'
  LAYERNORM_EPSILON = 1e-6
  QK_NORM: QkNorm = 'per_head'


class Qwen3Moe(GatedExperts, Qwen3):
  """The architecture of Qwen3's mixtures of experts: every block has gated experts."""

  NUM_EXPERTS = 128
  NUM_EXPERTS_PER_TOKEN = 8


@register
class Qwen2_5_0_5B(Qwen2):
  """494,032,768 parameters: Qwen2-0.5B and Qwen2.5-0.5B, with tied embedding."""

  NUM_LAYERS = 24
  NUM_HEADS = 14
  NUM_KV_HEADS = 2
  MODEL_DIMS = 896
  HIDDEN_DIMS = 4864
  SEPARATE_EMBEDDING = False
  PERCORE_BATCH_SIZE = 4


@register
class Qwen2_5_1_5B(Qwen2):
  """1,543,714,304 parameters: Qwen2-1.5B and Qwen2.5-1.5B, with tied embedding."""

  NUM_LAYERS = 28
  NUM_HEADS = 12
  NUM_KV_HEADS = 2
  MODEL_DIMS = 1536
  HIDDEN_DIMS = 8960
  SEPARATE_EMBEDDING = False
  ICI_MESH_SHAPE = [1, 8, 1]


@register
class Qwen2_5_3B(Qwen2):
  """3,085,938,688 parameters: Qwen2.5-3B, with tied embedding."""

  NUM_LAYERS = 36
  NUM_HEADS = 16
  NUM_KV_HEADS = 2
  MODEL_DIMS = 2048
  HIDDEN_DIMS = 11008
  SEPARATE_EMBEDDING = False
  ICI_MESH_SHAPE = [1, 8, 1]


@register
class Qwen2_5_7B(Qwen2):
  """7,615,616,512 parameters: Qwen2-7B and Qwen2.5-7B."""

  NUM_LAYERS = 28
  NUM_HEADS = 28
  NUM_KV_HEADS = 4
  MODEL_DIMS = 3584
  HIDDEN_DIMS = 18944
  VOCAB_SIZE = 152_064
  ICI_MESH_SHAPE = [1, 8, 1]


@register
class Qwen2_5_14B(Qwen2):
  """14,770,033,664 parameters: Qwen2.5-14B."""

  NUM_LAYERS = 48
  NUM_HEADS = 40
  NUM_KV_HEADS = 8
  MODEL_DIMS = 5120
  HIDDEN_DIMS = 13824
  VOCAB_SIZE = 152_064
  LAYERNORM_EPSILON = 1e-05
  ICI_MESH_SHAPE = [1, 8, 1]


@register
class Qwen2_5_32B(Qwen2):
  """32,763,876,352 parameters: Qwen2.5-32B."""

  NUM_LAYERS = 64
  NUM_HEADS = 40
  NUM_KV_HEADS = 8
  MODEL_DIMS = 5120
  HIDDEN_DIMS = 27648
  VOCAB_SIZE = 152_064
  LAYERNORM_EPSILON = 1e-05
  ICI_MESH_SHAPE = [1, 8, 1]
  DCN_MESH_SHAPE = [1, 2, 1]


@register
class Qwen2_72B(Qwen2):
  """72,706,203,648 parameters: Qwen2-72B."""

  NUM_LAYERS = 80
  NUM_HEADS = 64
  NUM_KV_HEADS = 8
  MODEL_DIMS = 8192
  HIDDEN_DIMS = 29568
  VOCAB_SIZE = 152_064
  ICI_MESH_SHAPE = [1, 8, 1]
  DCN_MESH_SHAPE = [1, 4, 1]


@register
class Qwen2_5_72B(Qwen2_72B):
  """72,706,203,648 parameters: Qwen2.5-72B, whose norms have another epsilon."""

  LAYERNORM_EPSILON = 1e-05


@register
class Qwen3_0_6B(Qwen3):
  """596,049,920 parameters: Qwen3-0.6B, with tied embedding."""

  NUM_LAYERS = 28
  NUM_HEADS = 16
  NUM_KV_HEADS = 8
  MODEL_DIMS = 1024
  HIDDEN_DIMS = 3072
  SEPARATE_EMBEDDING = False
  PERCORE_BATCH_SIZE = 4


@register
class Qwen3_1_7B(Qwen3):
  """1,720,574,976 parameters: Qwen3-1.7B, with tied embedding."""

  NUM_LAYERS = 28
  NUM_HEADS = 16
  NUM_KV_HEADS = 8
  MODEL_DIMS = 2048
  HIDDEN_DIMS = 6144
  SEPARATE_EMBEDDING = False
  ICI_MESH_SHAPE = [1, 8, 1]


@register
class Qwen3_4B(Qwen3):
  """4,022,468,096 parameters: Qwen3-4B, with tied embedding."""

  NUM_LAYERS = 36
  NUM_HEADS = 32
  NUM_KV_HEADS = 8
  MODEL_DIMS = 2560
  HIDDEN_DIMS = 9728
  SEPARATE_EMBEDDING = False
  ICI_MESH_SHAPE = [1, 8, 1]


@register
class Qwen3_8B(Qwen3):
  """8,190,735,360 parameters: Qwen3-8B."""

  NUM_LAYERS = 36
  NUM_HEADS = 32
  NUM_KV_HEADS = 8
  MODEL_DIMS = 4096
  HIDDEN_DIMS = 12288
  ICI_MESH_SHAPE = [1, 8, 1]


@register
class Qwen3_14B(Qwen3):
  """14,768,307,200 parameters: Qwen3-14B."""

  NUM_LAYERS = 40
  NUM_HEADS = 40
  NUM_KV_HEADS = 8
  MODEL_DIMS = 5120
  HIDDEN_DIMS = 17408
  ICI_MESH_SHAPE = [1, 8, 1]


@register
class Qwen3_32B(Qwen3):
  """32,762,123,264 parameters: Qwen3-32B."""

  NUM_LAYERS = 64
  NUM_HEADS = 64
  NUM_KV_HEADS = 8
  MODEL_DIMS = 5120
  HIDDEN_DIMS = 25600
  ICI_MESH_SHAPE = [1, 8, 1]
  DCN_MESH_SHAPE = [1, 2, 1]


@register
class Qwen3_30B_A3B(Qwen3Moe):
  """30,532,122,624 parameters: Qwen3-30B-A3B; a token uses 3.3 billion of them."""

  NUM_LAYERS = 48
  NUM_HEADS = 32
  NUM_KV_HEADS = 4
  MODEL_DIMS = 2048
  HIDDEN_DIMS = 6144
  EXPERT_HIDDEN_DIMS = 768
  ICI_MESH_SHAPE = [1, 8, 1]
  DCN_MESH_SHAPE = [1, 2, 1]


@register
class Qwen3_235B_A22B(Qwen3Moe):
  """235,093,634,560 parameters: Qwen3-235B-A22B; a token uses 22 billion of them."""

  NUM_LAYERS = 94
  NUM_HEADS = 64
  NUM_KV_HEADS = 4
  MODEL_DIMS = 4096
  HIDDEN_DIMS = 12288
  EXPERT_HIDDEN_DIMS = 1536
  ICI_MESH_SHAPE = [1, 8, 1]
  DCN_MESH_SHAPE = [1, 16, 1]
