"""Attention of rows that are split over the mesh axis context, without a gather of all keys."""

import dataclasses
import functools

import jax

from paxlite.context_parallelism import halo_attention, ring_attention, ulysses_attention
from paxlite.context_parallelism.context_choice import estimates, fastest, shapes_of
from paxlite.context_parallelism.ring_attention import Ring
from paxlite.layers.attention import attention_kernels
from paxlite.layers.attention.attention_case import Case
from paxlite.layers.attention.attention_kernel import ContextWay, Way
from paxlite.layers.attention.tiled_attention import TILE
from paxlite.parallel import partitioning


@dataclasses.dataclass(frozen=True)
class ContextAttention:
  """Attention of rows that are split over devices."""

  case: Case  # what is asked for, with the arrays of all devices
  way: ContextWay = 'auto'  # the way to compute it; 'auto': the fastest by the estimates

  def chosen(self) -> Way:
    """Returns how this attention is computed on the active mesh."""
    if self.case.shards('length') == 1 or not self.case.has_parts:
      return 'gather'
    possible = estimates(shapes_of(self.case))
    if self.way == 'auto':
      return fastest(possible)
    return self.way if self.way in possible else 'gather'

  def described(self) -> str:
    """Returns a sentence on the way that is chosen, and the estimates of all."""
    known = estimates(shapes_of(self.case))
    if not self.case.has_parts:
      known = {'gather': known['gather']}
    way = fastest(known) if self.way == 'auto' else self.way
    listed = ', '.join(
      f'{name} {e.seconds * 1e3:.2f} ms and {e.sent / 1e6:,.0f} MB sent'
      + (f' with {e.held / 2**30:.1f} GiB of scores or masks' if e.held > 1 << 30 else '')
      for name, e in known.items()
    )
    return f'{way}. Estimates of a layer forward: {listed}.'

  def __call__(self, way: Way) -> jax.Array:
    """Returns the context, [B, T, N, H]; `way` is not gather."""
    (axis,) = partitioning.axes_of(self.case.rules['length'])
    ring = Ring(axis, self.case.sizes[axis])
    return self.case.on_devices(functools.partial(self._local, way, ring), 'length')

  def _local(
    self,
    way: Way,
    ring: Ring,
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    ids_BT: jax.Array | None,
    logit_N: jax.Array | None,
    _: None,
  ) -> jax.Array:
    """The attention of one device's queries, which have no bias."""
    window = self.case.softmax.window
    if ids_BT is not None:
      # Otherwise JAX would compute all masks before a loop over layers, and keep them.
      ids_BT, k_BTKH = jax.lax.optimization_barrier((ids_BT, k_BTKH))
    qkv = q_BTNH, k_BTKH, v_BTKH
    if way == 'heads':
      return ulysses_attention.attend(qkv, ids_BT, logit_N, self._whole_rows, ring)
    if 0 < window < q_BTNH.shape[1] * ring.size:
      kernel = functools.partial(self._whole_rows, logit_N=logit_N)
      case = self.case.with_arrays(qkv, ids_BT, logit_N, over_context=True)
      by_array = attention_kernels.local(case).masks_by_array(case)
      piece = halo_attention.piece(window, q_BTNH.shape[1], TILE) if by_array else None
      return halo_attention.attend(qkv, ids_BT, kernel, window, ring, piece)
    # for halves of this device's queries and halves of a device's keys
    half = lambda x: jax.ShapeDtypeStruct((x.shape[0], x.shape[1] // 2, *x.shape[2:]), x.dtype)
    halves = (half(x) for x in qkv)
    case = self.case.with_arrays(halves, ids_BT, None, over_context=True)
    softmax = dataclasses.replace(case.softmax, window=0)
    parts = attention_kernels.parts(dataclasses.replace(case, softmax=softmax))
    return ring_attention.attend(qkv, ids_BT, logit_N, parts, ring)

  def _whole_rows(
    self,
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    ids_BT: jax.Array | None,
    logit_N: jax.Array | None,
  ) -> jax.Array:
    """Computes attention of whole rows on one device."""
    case = self.case.with_arrays((q_BTNH, k_BTKH, v_BTKH), ids_BT, logit_N, over_context=True)
    return attention_kernels.local(case).attend_locally(case)
