"""Attention by the first listed kernel that supports the case."""

import dataclasses
from typing import Literal

import jax

from paxlite import extensions
from paxlite.layers.attention import attention_kernels
from paxlite.layers.attention.attention_case import Case
from paxlite.layers.attention.cache_encoding import Stored
from paxlite.layers.attention.cached_attention import decoded
from paxlite.layers.attention.paged_vectors import PagedVectors
from paxlite.layers.attention.softmax_attention import AttentionMask, Softmax
from paxlite.parallel.partitioning import shard

Way = Literal['gather', 'ring', 'heads']
ContextWay = Literal['auto'] | Way


@dataclasses.dataclass(frozen=True)
class AttentionKernel:
  """Attention by the kernel that fits the platform and the shapes; see attention_kernels."""

  # queries per block, if attention is computed block by block; 0 chooses a size
  block_size: int = 0
  # whether fused kernels compute what they can: cuDNN's on NVIDIA GPUs, splash on TPUs
  fused: bool = False
  context: ContextWay = 'auto'  # how attention is computed where the mesh axis context splits rows
  max_segments: int | None = 0  # the most segments of a packed row, padding included; see Case

  def __call__(
    self,
    q_BTNH: jax.Array,
    k_BSKH: Stored,
    v_BSKH: Stored,
    visible: AttentionMask,
    bias_JNTS: jax.Array | None,
    softmax: Softmax,
  ) -> jax.Array:
    if visible.is_from_first and softmax.window >= q_BTNH.shape[1] == k_BSKH.shape[1]:
      softmax = dataclasses.replace(softmax, window=0)  # a query sees all tokens before it
    case = Case(
      q_BTNH, k_BSKH, v_BSKH, softmax, visible, bias_JNTS, fused=self.fused,
      block_size=self.block_size, max_segments=self.max_segments,
    )  # fmt: skip
    case = attention_kernels.in_rows(decoded(case))
    if case.shards('length') > 1:
      over_context = extensions.hook('the mesh axis context')(case, self.context)
      if (way := over_context.chosen()) != 'gather':
        return over_context(way)
    if not isinstance(case.k, PagedVectors):  # pages stay where they are
      names = 'batch', 'kv_length', 'act_kv_heads', None
      k, v = jax.tree.map(lambda x: shard(x, *names[: x.ndim]), (case.k, case.v))
      case = dataclasses.replace(case, k=k, v=v)
    return attention_kernels.first(case).attend(case)
