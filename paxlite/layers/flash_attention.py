"""Attention by cuDNN's fused kernels, where there are NVIDIA GPUs to run them."""

import functools

import jax
import jax.numpy as jnp

from paxlite.layers.attention import BlockwiseAttention
from paxlite.parallel import partitioning

_Q, _KV = ('batch', 'length', 'act_heads', None), ('batch', 'kv_length', 'act_kv_heads', None)


class FlashAttention(BlockwiseAttention):
  """The same by cuDNN, which never writes the scores to memory, on meshes of NVIDIA GPUs.

  Elsewhere, and where cuDNN has no kernel (float32, heads wider than 128, capped logits, a bias, an
  extra logit, dropout, cached keys, queries that are split over the mesh), as BlockwiseAttention
  does it. Segments become a bias of 0 and −∞, the only thing that is [B, T, T].
  """

  def attend(
    self,
    q_BTNH: jax.Array,
    k_BSGH: jax.Array,
    v_BSGH: jax.Array,
    mask: jax.Array,
    bias_NTS: jax.Array | None,
  ) -> jax.Array:
    plain = self.logit_cap <= 0 and bias_NTS is None and self.extra_logit is None
    if not plain or (self.dropout > 0 and self.has_rng('dropout')) or not _fits(q_BTNH, k_BSGH):
      return super().attend(q_BTNH, k_BSGH, v_BSGH, mask, bias_NTS)
    attend = functools.partial(
      jax.nn.dot_product_attention,
      is_causal=True,
      scale=self.query_scale,
      local_window_size=(self.window - 1, 0) if self.window > 0 else None,
      implementation='cudnn',
    )
    segments = [mask] if mask.ndim == 4 else []  # causality and the window are the kernel's own
    active = partitioning.active_mesh()
    if active is None:
      return attend(q_BTNH, k_BSGH, v_BSGH, mask=segments[0] if segments else None)
    mesh, rules = active
    fitting = lambda names, x: partitioning.fitting(
      partitioning.spec(names, rules), x.shape, dict(mesh.shape)
    )
    specs = [fitting(_Q, q_BTNH), fitting(_KV, k_BSGH), fitting(_KV, v_BSGH)]
    specs += [fitting(('batch', None, 'length', 'kv_length'), m) for m in segments]
    # a compiled step with cuDNN's calls can be saved in a shard_map alone
    local = lambda q, k, v, *m: attend(q, k, v, mask=m[0] if m else None)
    sharded = jax.shard_map(
      local, mesh=mesh, in_specs=tuple(specs), out_specs=specs[0], check_vma=False
    )
    return sharded(q_BTNH, k_BSGH, v_BSGH, *segments)


def _fits(q_BTNH: jax.Array, k_BSGH: jax.Array) -> bool:
  """Whether cuDNN has a kernel for these shapes, here."""
  active = partitioning.active_mesh()
  on_gpu = partitioning.active_platform() in ('gpu', 'cuda')
  if not on_gpu or q_BTNH.dtype not in (jnp.bfloat16, jnp.float16):
    return False
  (T, N, H), (S, G) = q_BTNH.shape[1:], k_BSGH.shape[1:3]
  if T != S or T % 2 or H % 8 or H > 128:
    return False
  if active is None:
    return True
  mesh, rules = active
  shards = functools.partial(partitioning.num_shards, dict(mesh.shape), rules)
  whole = shards('length') == 1 and mesh.shape.get('stage', 1) == 1
  # each device has the keys of its own queries
  return whole and all(n % shards('act_heads') == 0 for n in (N, G))
