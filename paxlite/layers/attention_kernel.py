"""Chooses the kernel that computes attention. No other module makes this choice."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from paxlite.layers import cpu_attention, cudnn_attention, softmax_attention, splash_attention
from paxlite.layers.context_attention import ContextAttention
from paxlite.layers.context_choice import Way
from paxlite.layers.softmax_attention import Softmax, Visible
from paxlite.parallel.partitioning import active_mesh, active_platform, num_shards, shard

ContextWay = Literal['auto'] | Way
Kernel = Callable[..., jax.Array]  # see softmax_attention


@dataclasses.dataclass(frozen=True)
class AttentionKernel:
  """Attention by the kernel that fits the platform and the shapes.

  Attributes:
    block_size: Queries per block, if attention is computed block by block; 0 chooses a size.
    fused: Whether fused kernels compute what they can: cuDNN's on NVIDIA GPUs, splash on TPUs.
    context: How attention is computed where the mesh axis context splits rows; see context_choice.
    max_segments: The most segments of a packed row, padding included; see cudnn_call.Options.
  """

  block_size: int = 0
  fused: bool = False
  context: ContextWay = 'auto'
  max_segments: int = 0

  def __call__(
    self,
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    visible: Visible,
    bias_JNTS: jax.Array | None,
    softmax: Softmax,
  ) -> jax.Array:
    if softmax.window >= q_BTNH.shape[1] == k_BSKH.shape[1]:
      softmax = dataclasses.replace(softmax, window=0)  # a query sees all tokens before it
    way = None if self.context == 'auto' else self.context
    over_context = ContextAttention(softmax, self.fused, self.block_size, way, self.max_segments)
    segments = visible.segments
    chosen = over_context.chosen(q_BTNH, k_BSKH, segments is not None)
    if chosen != 'gather' and bias_JNTS is None:
      return over_context(chosen, q_BTNH, k_BSKH, v_BSKH, None if segments is None else segments[0])
    k_BSKH, v_BSKH = (
      shard(x, 'batch', 'kv_length', 'act_kv_heads', None) for x in (k_BSKH, v_BSKH)
    )
    fits = v_BSKH.shape[3] <= k_BSKH.shape[3]
    if self.fused and fits and cudnn_attention.computes(q_BTNH, k_BSKH, bias_JNTS, softmax):
      return cudnn_attention.attend(q_BTNH, k_BSKH, v_BSKH, segments, softmax, self.max_segments)
    if self.fused and splash_attention.computes(q_BTNH, k_BSKH, bias_JNTS, softmax):
      return splash_attention.attend(q_BTNH, k_BSKH, v_BSKH, segments, softmax)
    T, S = q_BTNH.shape[1], k_BSKH.shape[1]
    mask = visible.mask(T, S)
    on_cpu = active_platform() == 'cpu'
    kernel: Kernel = cpu_attention.attend if on_cpu else softmax_attention.attend
    block_size = self.block_size or (cpu_attention.block_size(T) if on_cpu and _unsplit() else T)
    if T != S or not _unsplit() or T % block_size or block_size == T or softmax.dropout is not None:
      return kernel(q_BTNH, k_BSKH, v_BSKH, mask, bias_JNTS, softmax)
    block_kernel: Kernel = functools.partial(kernel, softmax=softmax)
    if self.block_size:
      block_kernel = jax.checkpoint(block_kernel)
    return by_blocks(block_kernel, block_size, q_BTNH, k_BSKH, v_BSKH, mask, bias_JNTS)


def _unsplit() -> bool:
  """Returns whether all queries of a row are on one device."""
  active = active_mesh()
  return active is None or num_shards(dict(active[0].shape), active[1], 'length') == 1


def by_blocks(
  kernel: Kernel,
  block_size: int,
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKH: jax.Array,
  mask: jax.Array,
  bias_JNTS: jax.Array | None,
) -> jax.Array:
  """Applies `kernel` to blocks of queries, each with the keys up to the block's last query.

  With many blocks, half of the scores are never computed. Only the scores of one block exist at a
  time. This holds in the backward pass too, if `kernel` recomputes the scores there.
  """
  contexts = []
  for stop in range(block_size, q_BTNH.shape[1] + block_size, block_size):
    rows = slice(stop - block_size, stop)
    bias = None if bias_JNTS is None else bias_JNTS[..., rows, :stop]
    contexts.append(
      kernel(q_BTNH[:, rows], k_BSKH[:, :stop], v_BSKH[:, :stop], mask[..., rows, :stop], bias)
    )
  return jnp.concatenate(contexts, axis=1)
