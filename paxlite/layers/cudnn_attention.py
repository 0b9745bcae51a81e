"""Attention by cuDNN's fused kernels, for NVIDIA GPUs."""

import functools

import jax
import jax.numpy as jnp

from paxlite.layers.softmax_attention import Softmax
from paxlite.parallel import partitioning

_Q, _KV = ('batch', 'length', 'act_heads', None), ('batch', 'kv_length', 'act_kv_heads', None)


def attend(
  q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, mask: jax.Array, softmax: Softmax
) -> jax.Array:
  """Computes attention by cuDNN's kernel, which never writes the scores to memory.

  JAX turns a mask of segments into a bias of 0 and −∞, which is the only array [B, T, T].
  """
  kernel = functools.partial(
    jax.nn.dot_product_attention,
    is_causal=True,
    scale=softmax.query_scale,
    local_window_size=(softmax.window - 1, 0) if softmax.window > 0 else None,
    implementation='cudnn',
  )
  segments = [mask] if mask.ndim == 4 else []  # the kernel itself masks later keys and the window
  active = partitioning.active_mesh()
  if active is None:
    return kernel(q_BTNH, k_BSKH, v_BSKH, mask=segments[0] if segments else None)
  mesh, rules = active
  fitting = lambda names, x: partitioning.fitting(
    partitioning.spec(names, rules), x.shape, dict(mesh.shape)
  )
  specs = [fitting(_Q, q_BTNH), fitting(_KV, k_BSKH), fitting(_KV, v_BSKH)]
  specs += [fitting(('batch', None, 'length', 'kv_length'), m) for m in segments]
  # a compiled step with calls of cuDNN can be saved only if the calls are in a shard_map
  local = lambda q, k, v, *m: kernel(q, k, v, mask=m[0] if m else None)
  sharded = jax.shard_map(
    local, mesh=mesh, in_specs=tuple(specs), out_specs=specs[0], check_vma=False
  )
  return sharded(q_BTNH, k_BSKH, v_BSKH, *segments)


def computes(
  q_BTNH: jax.Array, k_BSKH: jax.Array, bias_JNTS: jax.Array | None, softmax: Softmax
) -> bool:
  """Returns whether cuDNN has a kernel for this attention on this platform and mesh.

  It has no kernel for capped logits, a bias, an extra logit or dropout.
  """
  plain = softmax.logit_cap <= 0 and softmax.extra_logit is None and softmax.dropout is None
  return plain and bias_JNTS is None and _has_kernel(q_BTNH, k_BSKH)


def _has_kernel(q_BTNH: jax.Array, k_BSKH: jax.Array) -> bool:
  """Returns whether cuDNN has a kernel for these shapes on this platform and mesh.

  It has no kernel for float32, head widths above the largest or not divisible by 8, odd lengths,
  and cached keys. Neither is it used if a sequence or the layers are split over the mesh.
  """
  active = partitioning.active_mesh()
  on_gpu = partitioning.active_platform() in ('gpu', 'cuda')
  if not on_gpu or q_BTNH.dtype not in (jnp.bfloat16, jnp.float16):
    return False
  (T, N, H), (S, K) = q_BTNH.shape[1:], k_BSKH.shape[1:3]
  is_narrow = _largest_width() >= H
  if T != S or T % 2 or H % 8 or not is_narrow:
    return False
  if active is None:
    return True
  mesh, rules = active
  shards = functools.partial(partitioning.num_shards, dict(mesh.shape), rules)
  whole = shards('length') == 1 and mesh.shape.get('stage', 1) == 1
  # each device must hold the keys of its own query heads
  return whole and all(n % shards('act_heads') == 0 for n in (N, K))


def _largest_width() -> int:
  """Returns the largest width of a head that the kernels compute: 256 from Hopper on, else 128."""
  active = partitioning.active_mesh()
  device = active[0].devices.flat[0] if active else jax.devices()[0]
  return 256 if float(getattr(device, 'compute_capability', 0)) >= 9 else 128
