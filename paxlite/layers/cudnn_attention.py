"""Attention by cuDNN's fused kernels, for NVIDIA GPUs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from paxlite.core.trees import ArrayOrShape
from paxlite.layers import cudnn_call
from paxlite.layers.folded_vmap import folded, with_folded_vmap
from paxlite.layers.partial_attention import Partial, extra_logits
from paxlite.layers.softmax_attention import Segments, Softmax
from paxlite.parallel import partitioning

_Q, _KV = ('batch', 'length', 'act_heads', None), ('batch', 'kv_length', 'act_kv_heads', None)
_SEGMENTS, _LOGITS = ('batch', 'length'), ('act_heads',)
LEAST_CAPABILITY = 8  # of a GPU that has the kernels: Ampere
_LARGEST_OFFSET = 2**31 - 1  # cuDNN gets the bounds of segments in elements, as int32


def attend(
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKH: jax.Array,
  segments: Segments | None,
  softmax: Softmax,
  max_segments: int = 0,
) -> jax.Array:
  """Computes causal attention by cuDNN's kernel, which never writes the scores to memory.

  Args:
    q_BTNH: Queries.
    k_BSKH: Keys, as many as queries.
    v_BSKH: Values, as wide as keys or narrower.
    segments: Segment ids of the queries and of the keys, which are the same; None where there are
      none. cuDNN gets them as a bias of 0 and −∞, which is the only array [B, T, T].
    softmax: The scale, the window and the extra logit.
    max_segments: If it is above 0, cuDNN gets the bounds of the segments instead of a bias and
      skips the scores between segments. A row must not have more segments, padding included. This
      needs Hopper, no window and no extra logit.
  """
  width = v_BSKH.shape[3]
  if width < k_BSKH.shape[3]:
    # latent attention has narrower values, and cuDNN has that only from its version 9.10 on
    v_BSKH = jnp.pad(v_BSKH, [*[(0, 0)] * 3, (0, k_BSKH.shape[3] - width)])
    return attend(q_BTNH, k_BSKH, v_BSKH, segments, softmax, max_segments)[..., :width]
  ids_BT = None if segments is None else segments[0]
  arrays = q_BTNH, k_BSKH, v_BSKH, ids_BT, extra_logits(softmax, q_BTNH.shape[2])

  def local(
    q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array | None, logit_N: jax.Array | None
  ) -> jax.Array:
    of_device = dataclasses.replace(softmax, extra_logit=logit_N)
    return attend_locally(q, k, v, ids, softmax=of_device, max_segments=max_segments)

  active = partitioning.active_mesh()
  if active is None:
    return local(*arrays)
  mesh, rules = active
  specs = tuple(
    None if x is None else partitioning.spec_of(x, names, mesh, rules)
    for names, x in zip((_Q, _KV, _KV, _SEGMENTS, _LOGITS), arrays, strict=True)
  )
  # a compiled step with calls of cuDNN can be saved only if the calls are in a shard_map
  sharded = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=False)
  return sharded(*arrays)


def attend_locally(
  q_BTNH: jax.Array,
  k_BTKH: jax.Array,
  v_BTKH: jax.Array,
  segment_ids_BT: jax.Array | None = None,
  *,
  softmax: Softmax,
  max_segments: int = 0,
) -> jax.Array:
  """Computes causal attention of one device's rows and heads; see `attend`."""
  B, _, N, _ = q_BTNH.shape
  logit_N = extra_logits(softmax, N)
  if segment_ids_BT is None and logit_N is None:
    return jax.nn.dot_product_attention(
      q_BTNH,
      k_BTKH,
      v_BTKH,
      is_causal=True,
      scale=softmax.query_scale,
      local_window_size=(softmax.window - 1, 0) if softmax.window > 0 else None,
      implementation='cudnn',
    )
  options = cudnn_call.Options(softmax.query_scale, softmax.window)
  if takes_bounds(q_BTNH.size, softmax, capability()) and segment_ids_BT is not None:
    options = dataclasses.replace(options, max_segments=max_segments)
  logit_BN = None if logit_N is None else jnp.broadcast_to(logit_N, (B, N))

  def of_rows(q: jax.Array, k: jax.Array, v: jax.Array, *others: jax.Array) -> jax.Array:
    given = iter(others)
    ids, logit = (None if x is None else next(given) for x in (segment_ids_BT, logit_BN))
    return cudnn_call.attend(q, k, v, ids, logit, options)

  active = partitioning.active_mesh()
  if active is not None and active[0].shape.get('stage', 1) > 1:
    of_rows = with_folded_vmap(of_rows)
  others = (x for x in (segment_ids_BT, logit_BN) if x is not None)
  return of_rows(q_BTNH, k_BTKH, v_BTKH, *others)


def takes_bounds(size: int, softmax: Softmax, capability: float) -> bool:
  """Returns whether cuDNN can get the bounds of segments instead of a bias.

  Args:
    size: The number of elements of one device's queries.
    softmax: The window and the extra logit, neither of which may be there.
    capability: The compute capability of the GPU.
  """
  is_full = softmax.window <= 0 and softmax.extra_logit is None
  return is_full and capability >= 9 and size <= _LARGEST_OFFSET


@dataclasses.dataclass(frozen=True)
class CudnnParts:
  """A PartKernel of cuDNN, for a softmax without a cap, a window and an extra logit."""

  softmax: Softmax

  def forward(
    self, q: jax.Array, k: jax.Array, v: jax.Array, segments: Segments | None, causal: bool
  ) -> Partial:
    """See PartKernel."""

    def of_rows(q: jax.Array, k: jax.Array, v: jax.Array, *ids: jax.Array) -> Partial:
      return cudnn_call.forward(q, k, v, (ids[0], ids[1]) if ids else None, self._options(causal))

    return folded(of_rows)(q, k, v, *(segments or ()))

  def backward(
    self,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments | None,
    causal: bool,
    whole: Partial,
    gradient: jax.Array,
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See PartKernel."""

    def of_rows(*arrays: jax.Array) -> tuple[jax.Array, ...]:
      q, k, v, context, log_sum, gradient, *ids = arrays
      of_texts = (ids[0], ids[1]) if ids else None
      whole = Partial(context, log_sum)
      return cudnn_call.backward(q, k, v, of_texts, self._options(causal), whole, gradient)

    return folded(of_rows)(q, k, v, *whole, gradient, *(segments or ()))

  def _options(self, causal: bool) -> cudnn_call.Options:
    return cudnn_call.Options(self.softmax.query_scale, causal=causal)


def computes_locally(q_BTNH: ArrayOrShape, k_BSKH: ArrayOrShape, softmax: Softmax) -> bool:
  """Returns whether cuDNN has a kernel for one device's rows and heads."""
  return _is_plain(softmax) and _has_shapes(q_BTNH, k_BSKH)


def computes(
  q_BTNH: jax.Array, k_BSKH: jax.Array, bias_JNTS: jax.Array | None, softmax: Softmax
) -> bool:
  """Returns whether cuDNN has a kernel for this attention on this platform and mesh.

  It has no kernel for capped logits, a bias or dropout.
  """
  return bias_JNTS is None and _is_plain(softmax) and _has_kernel(q_BTNH, k_BSKH)


def _is_plain(softmax: Softmax) -> bool:
  return softmax.logit_cap <= 0 and softmax.dropout is None


def _has_kernel(q_BTNH: jax.Array, k_BSKH: jax.Array) -> bool:
  """Returns whether cuDNN has a kernel for these shapes on this platform and mesh.

  It is not used here if a sequence is split over the mesh.
  """
  if not _has_shapes(q_BTNH, k_BSKH):
    return False
  active = partitioning.active_mesh()
  if active is None:
    return True
  mesh, rules = active
  shards = functools.partial(partitioning.num_shards, dict(mesh.shape), rules)
  # each device must hold the keys of its own query heads
  of_heads = (x.shape[2] % shards('act_heads') == 0 for x in (q_BTNH, k_BSKH))
  return shards('length') == 1 and all(of_heads)


def _has_shapes(q_BTNH: ArrayOrShape, k_BSKH: ArrayOrShape) -> bool:
  """Returns whether cuDNN has a kernel for these shapes on this platform.

  It has no kernel for float32, head widths above the largest or not divisible by 8, odd lengths,
  cached keys, and GPUs before Ampere.
  """
  on_gpu = partitioning.active_platform() in ('gpu', 'cuda')
  if not on_gpu or q_BTNH.dtype not in (jnp.bfloat16, jnp.float16):
    return False
  T, H = q_BTNH.shape[1], q_BTNH.shape[3]
  if capability() < LEAST_CAPABILITY:
    return False
  return k_BSKH.shape[1] == T and T % 2 == 0 and H % 8 == 0 and _largest_width() >= H


def _largest_width() -> int:
  """Returns the largest width of a head that the kernels compute: 256 from Hopper on, else 128."""
  return 256 if capability() >= 9 else 128


def capability() -> float:
  """Returns the compute capability of the GPUs, 9.0 for Hopper; 0 on other devices."""
  active = partitioning.active_mesh()
  return capability_of(active[0].devices.flat[0] if active else jax.devices()[0])


def capability_of(device: jax.Device) -> float:
  """Returns the compute capability of a device; 0 if it is not an NVIDIA GPU."""
  found = str(getattr(device, 'compute_capability', ''))
  return float(found) if found.replace('.', '', 1).isdigit() else 0.0
