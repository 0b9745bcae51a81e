"""Attention by splash, the Pallas kernels for TPUs that come with JAX.

The scores exist in the chip's own memory alone, a block at a time. Blocks that the causal mask or
the window leaves empty are not computed.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from paxlite.core.trees import ArrayOrShape
from paxlite.layers.partial_attention import RESULTS, Partial
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
    v_BSKH: Values, of any width.
    segments: Segment ids of the queries and of the keys, [B, T] each; None where there are none.
    softmax: The scale, the cap, the window and the extra logit.
  """
  local = functools.partial(attend_locally, softmax=dataclasses.replace(softmax, extra_logit=None))
  sinks_N = None
  if softmax.extra_logit is not None:
    logits = jnp.asarray(softmax.extra_logit, jnp.float32)
    sinks_N = jnp.broadcast_to(logits, q_BTNH.shape[2:3])
  active = partitioning.active_mesh()
  if active is None:
    return local(q_BTNH, k_BSKH, v_BSKH, segments, sinks_N)
  mesh, rules = active
  spec = lambda names, x: partitioning.spec_of(x, names, mesh, rules)
  specs: list[PartitionSpec | tuple[PartitionSpec, ...] | None] = [
    spec(_Q, q_BTNH),
    spec(_KV, k_BSKH),
    spec(_KV, v_BSKH),
  ]
  specs += [None if segments is None else tuple(spec(_SEGMENTS, x) for x in segments)]
  specs += [None if sinks_N is None else spec(('act_heads',), sinks_N)]
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
  if not computes_locally(q_BTNH, k_BSKH):
    return False
  active = partitioning.active_mesh()
  if active is None:
    return True
  mesh, rules = active
  shards = functools.partial(partitioning.num_shards, dict(mesh.shape), rules)
  # each device has the keys of its own queries
  of_heads = (x.shape[2] % shards('act_heads') == 0 for x in (q_BTNH, k_BSKH))
  whole = shards('length') == 1
  return whole and all(of_heads)


def computes_locally(q_BTNH: ArrayOrShape, k_BSKH: ArrayOrShape) -> bool:
  """Whether the kernels take one device's rows and heads, on this platform."""
  T, S = q_BTNH.shape[1], k_BSKH.shape[1]
  return partitioning.active_platform() == 'tpu' and T == S and T % _LANES == 0


def attend_locally(
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKH: jax.Array,
  segments: Segments | None,
  sinks_N: jax.Array | None,
  softmax: Softmax,
) -> jax.Array:
  """The attention of one device's rows and heads, in a shard_map."""
  from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

  T, N = q_BTNH.shape[1:3]
  kernel = _kernel((T, T), N, softmax, interpret=partitioning.active_platform() == 'cpu')
  ids = None if segments is None else splash.SegmentIds(*segments)
  context_BNTH = jax.vmap(lambda q, k, v, ids: kernel(q, k, v, ids, sinks_N))(
    _heads_first(q_BTNH * softmax.query_scale), _heads_first(k_BSKH), _heads_first(v_BSKH), ids
  )
  return _heads_first(context_BNTH).astype(v_BSKH.dtype)


def _heads_first(x_BTNH: jax.Array) -> jax.Array:
  """Exchanges heads and tokens, in either direction."""
  return x_BTNH.swapaxes(1, 2)


@dataclasses.dataclass(frozen=True)
class SplashParts:
  """A PartKernel of splash, for a softmax without a window and an extra logit."""

  softmax: Softmax

  def forward(
    self, q: jax.Array, k: jax.Array, v: jax.Array, segments: Segments | None, causal: bool
  ) -> Partial:
    """See PartKernel."""
    kernel = self._rows(q, k, segments, causal)
    context, log_sum = _with_log_sums(kernel, *self._arguments(q, k, v))
    return Partial(_heads_first(context), log_sum)

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
    kernel = self._rows(q, k, segments, causal)
    kept = Partial(_heads_first(whole.context), whole.log_sum)
    dq, dk, dv = _gradients(kernel, self._arguments(q, k, v), kept, _heads_first(gradient))
    return _heads_first(dq) * self.softmax.query_scale, _heads_first(dk), _heads_first(dv)

  def _arguments(self, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
    return _heads_first(q * self.softmax.query_scale), _heads_first(k), _heads_first(v)

  def _rows(
    self, q: jax.Array, k: jax.Array, segments: Segments | None, causal: bool
  ) -> Callable[..., jax.Array]:
    """Returns the kernel for a part of all rows, with heads before tokens."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    interpret = partitioning.active_platform() == 'cpu'
    shape = q.shape[1], k.shape[1]
    kernel = _kernel(shape, q.shape[2], self.softmax, interpret, causal)
    ids = None if segments is None else splash.SegmentIds(*segments)

    def rows(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
      # the reader of compiled programs needs to know what the kernel leaves out
      with jax.named_scope('causal' if causal else EVERY_KEY):
        return jax.vmap(kernel)(q, k, v, ids)

    return rows


EVERY_KEY = 'every_key'  # is in the names of calls whose mask is empty


def _kernel(
  shape: tuple[int, int], heads: int, softmax: Softmax, interpret: bool, causal: bool = True
) -> Callable[..., jax.Array]:
  """The kernels of a forward and a backward pass for the queries and the keys of one row."""
  from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
  from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

  from paxlite.layers import splash_mask

  mask: masks.Mask = splash_mask.CausalMask(shape)
  if not causal:
    mask = masks.FullMask(shape)
  elif softmax.window > 0:
    mask = splash_mask.LocalMask(shape, softmax.window)
  of_q, of_k = (next(n for n in _BLOCKS if length % n == 0) for length in shape)
  return splash.make_splash_mha(
    masks.MultiHeadMask([mask] * heads),
    block_sizes=splash.BlockSizes(
      block_q=of_q, block_kv=of_k, block_q_dkv=of_q, block_kv_dkv=of_k,
      block_q_dq=of_q, block_kv_dq=of_k,
    ),
    attn_logits_soft_cap=softmax.logit_cap if softmax.logit_cap > 0 else None,
    head_shards=1,
    q_seq_shards=1,
    residual_checkpoint_name=RESULTS,
    interpret=interpret,
  )  # fmt: skip


# Splash's backward kernel is not public. But what jax.vjp returns is a pytree of the arrays that
# this kernel reads, the log-sums among them.


def _with_log_sums(
  kernel: Callable[..., jax.Array], *qkv: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns the context of a fused kernel and its log-sums [B, N, T], for q, k and v."""
  context, pull = jax.vjp(kernel, *qkv)
  leaves = jax.tree.leaves(pull)
  return context, leaves[_places(leaves, context)[1]]


def _gradients(
  kernel: Callable[..., jax.Array],
  qkv: tuple[jax.Array, ...],
  whole: Partial,
  gradient: jax.Array,
) -> tuple[jax.Array, ...]:
  """Returns the gradients of q, k and v; the arguments are in the kernel's own layout.

  XLA removes the forward kernel, whose results nothing uses.
  """
  context, pull = jax.vjp(kernel, *qkv)
  leaves, tree = jax.tree.flatten(pull)
  for place, kept in zip(_places(leaves, context), whole, strict=True):
    leaves[place] = kept.astype(leaves[place].dtype)
  return jax.tree.unflatten(tree, leaves)(gradient.astype(context.dtype))


def _places(leaves: list[jax.Array], context: jax.Array) -> tuple[int, int]:
  """Returns the places of the context and of the log-sums among what a backward kernel reads.

  Log-sums are the only array of float32 without a width. The context is next to them.
  """
  like = lambda i, dims: 0 <= i < len(leaves) and sorted(leaves[i].shape) == sorted(dims)
  sums = [i for i, x in enumerate(leaves) if x.dtype == jnp.float32 and x.ndim == 3]
  found = [
    (i, at)
    for at in sums
    for i in (at - 1, at + 1)
    if like(i, context.shape) and like(at, context.shape[:-1])
  ]
  if len(found) != 1:
    raise RuntimeError(
      'this version of JAX keeps other arrays for the backward kernel of attention than paxlite '
      'knows: --fdl.CONTEXT_ATTENTION=heads'
    )
  return found[0]
