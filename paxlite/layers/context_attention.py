"""Attention of rows that are split over the mesh axis context, without a gather of all keys."""

import dataclasses
import functools

import jax
from jax.sharding import PartitionSpec

from paxlite.layers import (
  blockwise_attention,
  cudnn_attention,
  head_scatter_attention,
  ring_attention,
  splash_attention,
  window_attention,
)
from paxlite.layers.blockwise_attention import Blockwise
from paxlite.layers.context_choice import Shapes, Way, estimates, fastest
from paxlite.layers.partial_attention import PartKernel, extra_logits
from paxlite.layers.ring_attention import Ring
from paxlite.layers.softmax_attention import Softmax
from paxlite.layers.tiled_attention import TILE, Tiled
from paxlite.parallel import partitioning

_Q, _KV = ('batch', 'length', 'act_heads', None), ('batch', 'length', 'act_kv_heads', None)


@dataclasses.dataclass(frozen=True)
class ContextAttention:
  """Attention of rows that are split over devices.

  Attributes:
    softmax: The scale, the cap, the window and the extra logit.
    fused: Whether fused kernels compute what they can.
    block_size: The most keys whose scores plain XLA holds at a time; 0 chooses.
    way: The way to compute it; None means the fastest by the estimates.
    max_segments: The most segments of a row, padding included; see cudnn_call.Options.
  """

  softmax: Softmax
  fused: bool
  block_size: int = 0
  way: Way | None = None
  max_segments: int = 0

  def chosen(self, q_BTNH: jax.Array, k_BSKH: jax.Array, packed: bool) -> Way:
    """Returns how this attention is computed on the active mesh.

    Args:
      q_BTNH: Queries.
      k_BSKH: Keys.
      packed: Whether rows have segments.
    """
    active = partitioning.active_mesh()
    if active is None or self.softmax.dropout is not None or q_BTNH.shape[1] != k_BSKH.shape[1]:
      return 'gather'
    mesh, rules = active
    shards = functools.partial(partitioning.num_shards, dict(mesh.shape), rules)
    size, heads = shards('length'), shards('act_heads')
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    if size == 1 or N % heads or K % heads:
      return 'gather'
    on_gpu = self._on_gpu(q_BTNH, k_BSKH)
    rows = B // partitioning.shards_of('batch', B)
    of_whole_rows = rows * T * (N // heads // size) * H  # elements of queries
    takes_bounds = cudnn_attention.takes_bounds(
      of_whole_rows, self.softmax, cudnn_attention.capability()
    )
    has_kernel = on_gpu or splash_attention.computes_locally(q_BTNH, k_BSKH)
    shapes = Shapes(
      rows=rows,
      length=T,
      heads=N // heads,
      kv_heads=K // heads,
      width=H,
      size=size,
      window=self.softmax.window,
      masked_by_array=packed and on_gpu,
      max_segments=self.max_segments if takes_bounds else 0,
      fused=self.fused and has_kernel,
      itemsize=q_BTNH.dtype.itemsize,
    )
    possible = estimates(shapes)
    if self.way is None:
      return fastest(possible)
    return self.way if self.way in possible else 'gather'

  def _on_gpu(self, q_BTNH: jax.Array, k_BSKH: jax.Array) -> bool:
    """Returns whether cuDNN computes it, for which segments are an array [B, T, S]."""
    return self.fused and cudnn_attention.computes_locally(q_BTNH, k_BSKH, self.softmax)

  def __call__(
    self,
    way: Way,
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    segment_ids_BT: jax.Array | None,
  ) -> jax.Array:
    """Returns the context, [B, T, N, H]; `way` is not gather."""
    active = partitioning.active_mesh()
    assert active is not None
    mesh, rules = active
    (axis,) = partitioning.axes_of(rules['length'])
    logit_N = extra_logits(self.softmax, q_BTNH.shape[2])
    arrays = (q_BTNH, k_BTKH, v_BTKH, segment_ids_BT, logit_N)
    names = (_Q, _KV, _KV, ('batch', 'length'), ('act_heads',))
    specs: list[PartitionSpec | None] = [
      None if x is None else partitioning.spec_of(x, of, mesh, rules)
      for x, of in zip(arrays, names, strict=True)
    ]
    local = functools.partial(self._local, way, Ring(axis, mesh.shape[axis]))
    sharded = jax.shard_map(
      local, mesh=mesh, in_specs=tuple(specs), out_specs=specs[0], check_vma=False
    )
    return sharded(*arrays)

  def _local(
    self,
    way: Way,
    ring: Ring,
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    ids_BT: jax.Array | None,
    logit_N: jax.Array | None,
  ) -> jax.Array:
    """The attention of one device's queries."""
    window = self.softmax.window
    if ids_BT is not None:
      # Otherwise JAX would compute all masks before a loop over layers, and keep them.
      ids_BT, k_BTKH = jax.lax.optimization_barrier((ids_BT, k_BTKH))
    if way == 'heads':
      return head_scatter_attention.attend(
        q_BTNH, k_BTKH, v_BTKH, ids_BT, logit_N, self._whole_rows, ring
      )
    if 0 < window < q_BTNH.shape[1] * ring.size:
      kernel = functools.partial(self._whole_rows, logit_N=logit_N)
      by_array = ids_BT is not None and self._on_gpu(q_BTNH, k_BTKH)
      piece = window_attention.piece(window, q_BTNH.shape[1], TILE) if by_array else None
      return window_attention.attend(q_BTNH, k_BTKH, v_BTKH, ids_BT, kernel, window, ring, piece)
    parts = self._parts(q_BTNH, k_BTKH, v_BTKH)
    return ring_attention.attend(q_BTNH, k_BTKH, v_BTKH, ids_BT, logit_N, parts, ring)

  def _parts(self, q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array) -> PartKernel:
    """Returns the kernel for halves of this device's queries and halves of a device's keys."""
    softmax = dataclasses.replace(self.softmax, extra_logit=None, window=0)
    if self.fused and k_BTKH.shape == v_BTKH.shape:
      half = lambda x: jax.ShapeDtypeStruct((x.shape[0], x.shape[1] // 2, *x.shape[2:]), x.dtype)
      q, k = half(q_BTNH), half(k_BTKH)
      if cudnn_attention.computes_locally(q, k, softmax):
        return Tiled(cudnn_attention.CudnnParts(softmax))
      if splash_attention.computes_locally(q, k):
        return splash_attention.SplashParts(softmax)
    return Blockwise(softmax, self.block_size)

  def _whole_rows(
    self,
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    ids_BT: jax.Array | None,
    logit_N: jax.Array | None,
  ) -> jax.Array:
    """Computes attention of whole rows on one device."""
    softmax = dataclasses.replace(self.softmax, extra_logit=logit_N)
    segments = None if ids_BT is None else (ids_BT, ids_BT)
    if self.fused and k_BTKH.shape == v_BTKH.shape:
      if cudnn_attention.computes_locally(q_BTNH, k_BTKH, softmax):
        return cudnn_attention.attend_locally(
          q_BTNH, k_BTKH, v_BTKH, ids_BT, softmax=softmax, max_segments=self.max_segments
        )
      if splash_attention.computes_locally(q_BTNH, k_BTKH):
        return splash_attention.attend_locally(
          q_BTNH, k_BTKH, v_BTKH, segments, logit_N, dataclasses.replace(softmax, extra_logit=None)
        )
    return blockwise_attention.attend(q_BTNH, k_BTKH, v_BTKH, segments, softmax, self.block_size)
