"""Attention of rows that are split over the mesh axis context, without a gather of all keys."""

import dataclasses
import functools

import jax
from jax.sharding import PartitionSpec

from paxlite.core.trees import ArrayOrShape
from paxlite.layers import (
  attention_kernels,
  head_scatter_attention,
  ring_attention,
  window_attention,
)
from paxlite.layers.attention_case import Case
from paxlite.layers.context_choice import Way, estimates, fastest, needs_all_keys, shapes_of
from paxlite.layers.partial_attention import PartKernel, extra_logits
from paxlite.layers.ring_attention import Ring
from paxlite.layers.tiled_attention import TILE
from paxlite.parallel import partitioning

_Q, _KV = ('batch', 'length', 'act_heads', None), ('batch', 'length', 'act_kv_heads', None)


@dataclasses.dataclass(frozen=True)
class ContextAttention:
  """Attention of rows that are split over devices.

  Attributes:
    case: What is asked for, with the arrays of all devices.
    way: The way to compute it; None means the fastest by the estimates.
  """

  case: Case
  way: Way | None = None

  def chosen(self) -> Way:
    """Returns how this attention is computed on the active mesh."""
    if self.case.shards('length') == 1 or needs_all_keys(self.case):
      return 'gather'
    possible = estimates(shapes_of(self.case))
    if self.way is None:
      return fastest(possible)
    return self.way if self.way in possible else 'gather'

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
    logit_N = extra_logits(self.case.softmax, q_BTNH.shape[2])
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
    window = self.case.softmax.window
    if ids_BT is not None:
      # Otherwise JAX would compute all masks before a loop over layers, and keep them.
      ids_BT, k_BTKH = jax.lax.optimization_barrier((ids_BT, k_BTKH))
    if way == 'heads':
      return head_scatter_attention.attend(
        q_BTNH, k_BTKH, v_BTKH, ids_BT, logit_N, self._whole_rows, ring
      )
    if 0 < window < q_BTNH.shape[1] * ring.size:
      kernel = functools.partial(self._whole_rows, logit_N=logit_N)
      case = self._of_device(q_BTNH, k_BTKH, v_BTKH)
      by_array = attention_kernels.local(case).masks_by_array(case)
      piece = window_attention.piece(window, q_BTNH.shape[1], TILE) if by_array else None
      return window_attention.attend(q_BTNH, k_BTKH, v_BTKH, ids_BT, kernel, window, ring, piece)
    parts = self._parts(q_BTNH, k_BTKH, v_BTKH)
    return ring_attention.attend(q_BTNH, k_BTKH, v_BTKH, ids_BT, logit_N, parts, ring)

  def _of_device(self, q: ArrayOrShape, k: ArrayOrShape, v: ArrayOrShape) -> Case:
    """Returns what is asked for of one device's arrays."""
    return dataclasses.replace(self.case, q=q, k=k, v=v, over_context=True)

  def _parts(self, q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array) -> PartKernel:
    """Returns the kernel for halves of this device's queries and halves of a device's keys."""
    half = lambda x: jax.ShapeDtypeStruct((x.shape[0], x.shape[1] // 2, *x.shape[2:]), x.dtype)
    case = self._of_device(*(half(x) for x in (q_BTNH, k_BTKH, v_BTKH)))
    softmax = dataclasses.replace(case.softmax, extra_logit=None, window=0)
    return attention_kernels.parts(dataclasses.replace(case, softmax=softmax))

  def _whole_rows(
    self,
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    ids_BT: jax.Array | None,
    logit_N: jax.Array | None,
  ) -> jax.Array:
    """Computes attention of whole rows on one device."""
    case = self._of_device(q_BTNH, k_BTKH, v_BTKH)
    kernel = attention_kernels.local(case)
    return kernel.attend_locally(case, q_BTNH, k_BTKH, v_BTKH, ids_BT, logit_N)
