"""Attention by splash, the Pallas kernels for TPUs that come with JAX.

The scores exist in the chip's own memory alone, a block at a time. Blocks that the causal mask or
the window leaves empty are not computed.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from paxlite.layers.softmax_attention import Segments, Softmax
from paxlite.parallel import partitioning

_Q, _KV = ('batch', 'length', 'act_heads', None), ('batch', 'kv_length', 'act_kv_heads', None)
_SEGMENTS = ('batch', 'length')
_LANES = 128  # blocks are multiples of a TPU's vector lanes
_BLOCKS = (512, 256, _LANES)


def attend(
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKH: jax.Array,
  segments: Segments | None,
  softmax: Softmax,
) -> jax.Array:
  """Causal attention, [B, T, N, H].

  Args:
    q_BTNH: Queries.
    k_BSKH: Keys, as many as queries.
    v_BSKH: Values.
    segments: Segment ids of the queries and of the keys, [B, T] each; None where there are none.
    softmax: The scale, the cap, the window and the extra logit.
  """
  local = functools.partial(_attend, softmax=dataclasses.replace(softmax, extra_logit=None))
  sinks_N = None
  if softmax.extra_logit is not None:
    logits = jnp.asarray(softmax.extra_logit, jnp.float32)
    sinks_N = jnp.broadcast_to(logits, q_BTNH.shape[2:3])
  active = partitioning.active_mesh()
  if active is None:
    return local(q_BTNH, k_BSKH, v_BSKH, segments, sinks_N)
  mesh, rules = active
  fitting = lambda names, x: partitioning.fitting(
    partitioning.spec(names, rules), x.shape, dict(mesh.shape)
  )
  specs: list[Any] = [fitting(_Q, q_BTNH), fitting(_KV, k_BSKH), fitting(_KV, v_BSKH)]
  specs += [None if segments is None else tuple(fitting(_SEGMENTS, x) for x in segments)]
  specs += [None if sinks_N is None else fitting(('act_heads',), sinks_N)]
  # XLA cannot split a kernel over devices
  sharded = jax.shard_map(
    local, mesh=mesh, in_specs=tuple(specs), out_specs=specs[0], check_vma=False
  )
  return sharded(q_BTNH, k_BSKH, v_BSKH, segments, sinks_N)


def computes(
  q_BTNH: jax.Array, k_BSKH: jax.Array, bias_JNTS: jax.Array | None, softmax: Softmax
) -> bool:
  """Whether the kernels compute this attention, here.

  They know neither a bias nor dropout, and take whole rows of a multiple of 128 tokens.
  """
  return bias_JNTS is None and softmax.dropout is None and _has_kernel(q_BTNH, k_BSKH)


def _has_kernel(q_BTNH: jax.Array, k_BSKH: jax.Array) -> bool:
  """Whether the kernels take these shapes, here."""
  (T, N), (S, K) = q_BTNH.shape[1:3], k_BSKH.shape[1:3]
  if partitioning.active_platform() != 'tpu' or T != S or T % _LANES:
    return False
  active = partitioning.active_mesh()
  if active is None:
    return True
  mesh, rules = active
  shards = functools.partial(partitioning.num_shards, dict(mesh.shape), rules)
  whole = shards('length') == 1 and mesh.shape.get('stage', 1) == 1
  # each device has the keys of its own queries
  return whole and all(n % shards('act_heads') == 0 for n in (N, K))


def _attend(
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKH: jax.Array,
  segments: Segments | None,
  sinks_N: jax.Array | None,
  softmax: Softmax,
) -> jax.Array:
  """The attention of one device's rows and heads."""
  from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

  T, N = q_BTNH.shape[1:3]
  kernel = _kernel(T, N, softmax, interpret=partitioning.active_platform() == 'cpu')
  ids = None if segments is None else splash.SegmentIds(*segments)
  heads_first = lambda x_BTNH: x_BTNH.swapaxes(1, 2)
  context_BNTH = jax.vmap(lambda q, k, v, ids: kernel(q, k, v, ids, sinks_N))(
    heads_first(q_BTNH * softmax.query_scale), heads_first(k_BSKH), heads_first(v_BSKH), ids
  )
  return heads_first(context_BNTH).astype(v_BSKH.dtype)


def _kernel(length: int, heads: int, softmax: Softmax, interpret: bool) -> Any:
  """The kernels of a forward and a backward pass for the shapes of one row."""
  from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
  from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

  shape = length, length
  mask: masks.Mask = masks.CausalMask(shape)
  if softmax.window > 0:
    mask = masks.LocalMask(shape, (softmax.window - 1, 0), 0)
  block = next(n for n in _BLOCKS if length % n == 0)
  return splash.make_splash_mha(
    masks.MultiHeadMask([mask] * heads),
    block_sizes=splash.BlockSizes(
      block_q=block, block_kv=block, block_q_dkv=block, block_kv_dkv=block,
      block_q_dq=block, block_kv_dq=block,
    ),
    attn_logits_soft_cap=softmax.logit_cap if softmax.logit_cap > 0 else None,
    head_shards=1,
    q_seq_shards=1,
    interpret=interpret,
  )  # fmt: skip
