"""Attention by splash, the Pallas kernels for TPUs that come with JAX.

The scores exist in the chip's own memory alone, a block at a time. Blocks that the causal mask or
the window leaves empty are not computed.
"""

import dataclasses
import math
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp

from paxlite.layers.attention.attention_case import Case, KernelCall, LocalKernel
from paxlite.layers.attention.partial_attention import QKV, RESULTS, Partial, sink_logits
from paxlite.layers.attention.softmax_attention import Segments, Softmax
from paxlite.parallel import partitioning

_LANES = 128  # blocks are multiples of a TPU's vector lanes
_BLOCKS = (512, 256, _LANES)


class SplashKernel(LocalKernel):
  """Computes causal attention with caps, windows and attention sinks, and values of any width."""

  name = 'splash'
  platform = 'tpu'
  primitives = re.compile(r'\bsplash_m[hq]a_(fwd|dq|dkv)')

  def reasons(self, case: Case) -> dict[str, bool]:
    return {
      f'takes sequences with a multiple of {_LANES} tokens': case.q.shape[1] % _LANES != 0,
      'needs values as wide as keys if sequences are split over context': (
        case.over_context and case.v.shape[3] != case.k.shape[3]
      ),
    }

  def attend_locally(self, case: Case) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    (q_BTNH, k_BTKH, v_BTKH), segments = case.arrays, case.visible.segments
    T, N = q_BTNH.shape[1:3]
    softmax, sinks_N = case.softmax, sink_logits(case.softmax, N)
    kernel = _kernel((T, T), N, softmax, interpret=partitioning.active_platform() == 'cpu')
    ids = None if segments is None else splash.SegmentIds(*segments)
    context_BNTH = jax.vmap(lambda q, k, v, ids: kernel(q, k, v, ids, sinks_N))(
      _heads_first(q_BTNH * softmax.query_scale), _heads_first(k_BTKH), _heads_first(v_BTKH), ids
    )
    return _heads_first(context_BNTH).astype(v_BTKH.dtype)

  def parts(self, case: Case) -> 'SplashParts':
    return SplashParts(case.softmax)

  def flops(self, call: KernelCall) -> float:
    """Returns the FLOPs of one kernel, which does not state its cost.

    The forward kernel multiplies q kᵀ and p v. That of dq multiplies q kᵀ, do vᵀ and ds k, and that
    of dk and dv the first two, pᵀ do and dsᵀ q. Some products are as wide as keys, some as values.
    """
    assert self.primitives is not None
    (kind,) = self.primitives.findall(call.name)[:1]
    of_keys, of_values = {'fwd': (1, 1), 'dq': (2, 1), 'dkv': (2, 2)}[kind]
    q, k, v = call.operands[:3]
    # a causal mask leaves out half of the blocks; of a window's nothing is known here
    share = 2.0 if re.search(rf'\b{EVERY_KEY}\b', call.text) else 1.0
    return share * (of_keys * q[-1] + of_values * v[-1]) * math.prod(q[:-1]) * k[-2]


def _heads_first(x_BTNH: jax.Array) -> jax.Array:
  """Exchanges heads and tokens, in either direction."""
  return x_BTNH.swapaxes(1, 2)


@dataclasses.dataclass(frozen=True)
class SplashParts:
  """A PartialKernel of splash, for a softmax without a window and an attention sink."""

  softmax: Softmax

  def forward(self, qkv: QKV, segments: Segments | None, causal: bool) -> Partial:
    """See PartialKernel."""
    kernel = self._rows(qkv, segments, causal)
    context, lse = _with_lse(kernel, *self._arguments(qkv))
    return Partial(_heads_first(context), lse)

  def backward(
    self, qkv: QKV, segments: Segments | None, causal: bool, whole: Partial, gradient: jax.Array
  ) -> QKV:
    """See PartialKernel."""
    kernel = self._rows(qkv, segments, causal)
    kept = Partial(_heads_first(whole.context), whole.lse)
    dq, dk, dv = _gradients(kernel, self._arguments(qkv), kept, _heads_first(gradient))
    return _heads_first(dq) * self.softmax.query_scale, _heads_first(dk), _heads_first(dv)

  def _arguments(self, qkv: QKV) -> tuple[jax.Array, ...]:
    q, k, v = qkv
    return _heads_first(q * self.softmax.query_scale), _heads_first(k), _heads_first(v)

  def _rows(self, qkv: QKV, segments: Segments | None, causal: bool) -> Callable[..., jax.Array]:
    """Returns the kernel for a part of all rows, with heads before tokens."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    interpret = partitioning.active_platform() == 'cpu'
    shape = qkv[0].shape[1], qkv[1].shape[1]
    kernel = _kernel(shape, qkv[0].shape[2], self.softmax, interpret, causal)
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

  from paxlite.layers.attention import splash_mask

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


def _with_lse(kernel: Callable[..., jax.Array], *qkv: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns the context of a fused kernel and its log-sums [B, N, T], for q, k and v."""
  context, pull = jax.vjp(kernel, *qkv)
  leaves = jax.tree.leaves(pull)
  return context, leaves[_places(leaves, context)[1]]


def _gradients(
  kernel: Callable[..., jax.Array], qkv: tuple[jax.Array, ...], whole: Partial, gradient: jax.Array
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
  """Returns the indices of the context and of the log-sums among what a backward kernel reads.

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
      'this version of JAX saves arrays for the backward attention kernel that paxlite does not '
      'know: CONTEXT_ATTENTION=heads'
    )
  return found[0]
