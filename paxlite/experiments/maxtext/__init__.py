"""MaxText's sizes by their number of parameters, for 256 TPU v5e chips and more, without a dataset.

Batch, recomputation and most XLA options are those of MaxText's v5e scripts of 2024. Gradients in
bfloat16 and two more options keep the memory of a step below that of MaxText's own program.
`paxlite compile --fdl_config=MaxText16B --target=v5e-256` compiles one.
"""

from paxlite.experiments.llama import LLaMA
from paxlite.experiments.registry import register

_V5E = [
  'xla_tpu_enable_data_parallel_all_reduce_opt=true',
  'xla_tpu_data_parallel_opt_different_sized_ops=true',
  'xla_tpu_enable_async_collective_fusion=true',
  'xla_tpu_enable_async_collective_fusion_fuse_all_gather=true',
  'xla_tpu_enable_async_collective_fusion_multiple_steps=true',
  'xla_tpu_overlap_compute_collective_tc=true',
  'xla_enable_async_all_gather=true',
]
# XLA's scheduler would hold more arrays at a time as long as there is memory.
_LEAN = [*_V5E, 'xla_tpu_scheduler_percent_shared_memory_limit=65']


@register
class MaxText16B(LLaMA):
  """15,831,666,688 parameters, global batch 1536 of 2048 tokens on 256 chips."""

  NUM_LAYERS = 32
  NUM_HEADS = 64
  MODEL_DIMS = 4096
  DIMS_PER_HEAD = 128
  HIDDEN_DIMS = 28672
  HEADS_SPAN_MODEL = False
  VOCAB_SIZE = 32000
  MAX_SEQ_LEN = 2048

  ICI_MESH_SHAPE = [1, 256, 1]
  DCN_MESH_SHAPE = [1, 1, 1]
  PERCORE_BATCH_SIZE = 6
  CHECKPOINT_POLICY = 'SAVE_NOTHING'
  ATTENTION_BLOCK_SIZE = 256
  NUM_LOSS_CHUNKS = 8
  GRADIENT_DTYPE = 'bfloat16'
  # The gathers of the next layer would take 1 % less time, and more memory than MaxText's program.
  COMPILER_OPTIONS = [*_LEAN, 'xla_tpu_enable_ici_ag_pipelining=false']


@register
class MaxText32B(MaxText16B):
  """31,663,333,376 parameters, global batch 1024 of 2048 tokens on 256 chips."""

  MODEL_DIMS = 8192
  HEADS_SPAN_MODEL = True
  PERCORE_BATCH_SIZE = 4
  COMPILER_OPTIONS = _LEAN


@register
class MaxText64B(MaxText32B):
  """62,802,370,560 parameters, global batch 512 of 2048 tokens on 256 chips."""

  NUM_LAYERS = 64
  PERCORE_BATCH_SIZE = 2
  COMPILER_OPTIONS = _V5E


@register
class MaxText128B(MaxText64B):
  """125,079,396,352 parameters, global batch 256 of 2048 tokens on 256 chips, FSDP 16 × TP 16."""

  NUM_HEADS = 128
  HIDDEN_DIMS = 57344
  HEADS_SPAN_MODEL = False
  ICI_MESH_SHAPE = [1, 16, 16]
  PERCORE_BATCH_SIZE = 1


@register
class MaxText256B(MaxText128B):
  """250,158,792,704 parameters, for several slices.

  MaxText gives no batch and no mesh for this size; both are paxlite's own.
  """

  MODEL_DIMS = 16384
  DCN_MESH_SHAPE = [1, 4, 1]


@register
class MaxText512B(MaxText256B):
  """499,268,993,024 parameters; see MaxText256B."""

  NUM_LAYERS = 128
  DCN_MESH_SHAPE = [1, 8, 1]


@register
class MaxText1024B(MaxText512B):
  """997,485,199,360 parameters; see MaxText256B."""

  NUM_HEADS = 256
  HIDDEN_DIMS = 114688
  DCN_MESH_SHAPE = [1, 16, 1]
