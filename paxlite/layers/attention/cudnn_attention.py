"""Attention by cuDNN's fused kernels, for NVIDIA GPUs."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp

from paxlite.layers.attention import cudnn_call
from paxlite.layers.attention.attention_case import Case, KernelCall, LocalKernel
from paxlite.layers.attention.cached_attention import CachedKernel
from paxlite.layers.attention.folded_vmap import folded, with_folded_vmap
from paxlite.layers.attention.partial_attention import QKV, Partial, sink_logits, with_sink_logit
from paxlite.layers.attention.softmax_attention import Segments, Softmax
from paxlite.layers.attention.tiled_attention import Tiled
from paxlite.parallel import partitioning

_LEAST_CAPABILITY = 8  # of a GPU that has the kernels: Ampere
# Heads of keys that keep a GPU busy, which computes each in one block of threads: an H100 has 132
# multiprocessors. With fewer, plain XLA is not far from the memory's bandwidth.
_LEAST_HEADS = 128
_LARGEST_OFFSET = 2**31 - 1  # cuDNN gets the bounds of segments in elements, as int32


class CudnnKernel(LocalKernel):
  """Computes causal attention without ever writing the scores to memory.

  From Hopper on, cuDNN gets the bounds of segments and skips the scores between them, unless there
  is a window or an attention sink. There are at most `max_segments` in a row. Without such a
  number, the device counts them, and rows with more than usual get a bias of 0 and −∞ instead,
  which is the only array [B, T, T]. So do rows with a window or a sink, and other GPUs.

  A bias of the model's own, such as T5's, is rounded to the type of the queries, and so is its
  gradient.
  """

  knows_bias = True
  name = 'cuDNN'
  platform = 'gpu'
  primitives = re.compile(r'__cudnn\$fmha|\bdot_product_attention_[fb]wd')
  kept = re.compile(r'__cudnn\$fmha|\bdot_product_attention_fwd')

  def reasons(self, case: Case) -> dict[str, bool]:
    width, width_of_values = case.q.shape[3], case.v.shape[3]
    largest = 256 if case.capability >= 9 else 128  # the width of a head, from Hopper on
    return {
      **_reasons(case),
      'takes an even number of tokens': case.q.shape[1] % 2 != 0,
      'takes a bias only without segments, a window and stages': (
        case.bias is not None
        and (
          case.is_packed
          or case.over_context
          or case.bias.shape[:2] != (case.shards('batch'), case.q.shape[2])
          or case.softmax.window > 0
          or case.sizes.get('stage', 1) > 1
        )
      ),
      f'takes head widths that are multiples of 8, up to {largest}': (
        width % 8 != 0 or width > largest
      ),
      'needs values as wide as keys': (
        width_of_values != width if case.over_context else width_of_values > width
      ),
    }

  def attend(self, case: Case) -> jax.Array:
    _, k_BSKH, v_BSKH = case.arrays
    width = v_BSKH.shape[3]
    if width == k_BSKH.shape[3]:
      return super().attend(case)
    # latent attention has narrower values, and cuDNN has that only from its version 9.10 on
    v_BSKH = jnp.pad(v_BSKH, [*[(0, 0)] * 3, (0, k_BSKH.shape[3] - width)])
    return super().attend(dataclasses.replace(case, v=v_BSKH))[..., :width]

  def attend_locally(self, case: Case) -> jax.Array:
    (q_BTNH, k_BTKH, v_BTKH), softmax = case.arrays, case.softmax
    logit_N = sink_logits(softmax, q_BTNH.shape[2])
    bias_1NTS = None if case.bias is None else jnp.asarray(case.bias, q_BTNH.dtype)
    if not case.is_packed and logit_N is None and bias_1NTS is None:
      return jax.nn.dot_product_attention(
        q_BTNH, k_BTKH, v_BTKH, is_causal=True, scale=softmax.query_scale,
        local_window_size=(softmax.window - 1, 0) if softmax.window > 0 else None,
        implementation='cudnn',
      )  # fmt: skip
    bounds = self.bounds(case) if case.is_packed else 0
    options = cudnn_call.Options(
      softmax.query_scale, softmax.window, bounds, bias_for_more=case.max_segments is None
    )
    logit_BN = (
      None if logit_N is None else jnp.broadcast_to(logit_N, (q_BTNH.shape[0], q_BTNH.shape[2]))
    )
    ids_BT = case.visible.segments[0] if case.visible.segments else None

    def of_rows(q: jax.Array, k: jax.Array, v: jax.Array, *others: jax.Array) -> jax.Array:
      given = iter(others)
      ids, logit = (None if x is None else next(given) for x in (ids_BT, logit_BN))
      return cudnn_call.attend((q, k, v), ids, logit, bias_1NTS, options)

    active = partitioning.active_mesh()
    if active is not None and active[0].shape.get('stage', 1) > 1:
      of_rows = with_folded_vmap(of_rows)
    return of_rows(*case.arrays, *(x for x in (ids_BT, logit_BN) if x is not None))

  def parts(self, case: Case) -> Tiled:
    return Tiled(CudnnParts(case.softmax))

  def masks_by_array(self, case: Case) -> bool:
    return case.is_packed

  def bounds(self, case: Case) -> int:
    is_full = case.softmax.window <= 0 and case.softmax.sink_logit is None
    fits = math.prod(case.q.shape) <= _LARGEST_OFFSET
    if not is_full or not fits or case.capability < 9:
      return 0
    return _usual_segments(case.q.shape[1]) if case.max_segments is None else case.max_segments

  def flops(self, call: KernelCall) -> float:
    """Returns the FLOPs of two products forward or five backward; causal masks leave out half."""
    products = 5 if re.search('Backward|_bwd', call.name) else 2
    mask = re.search(r'mask_type\W+(?:MaskType\.)?(\w+)', call.text)
    share = 0.5 if mask and 'CAUSAL' in mask[1] else 1.0
    return 2.0 * products * share * math.prod(_scores(call)) * call.operands[0][-1]

  def peak_share(self, call: KernelCall) -> float:
    """Returns what an H200 reached: 0.31 for heads of 64, 0.43 for heads of 128, half with a bias.

    The exponential of a score takes as long for narrow heads as for wide ones.
    """
    share = 1 / (1.44 + 114 / call.operands[0][-1])
    return share / 2 if 'Bias' in call.name else share


class CudnnCachedKernel(CachedKernel):
  """Computes one query a row, and stops at the row's last key.

  cuDNN reads keys and values once, in the order of the cache.
  """

  name = 'cuDNN for cached keys'
  platform = 'gpu'

  def reasons(self, case: Case) -> dict[str, bool]:
    (_, T, _, width), (B, _, K, _) = case.q.shape, case.k.shape
    largest = 256 if case.capability >= 9 else 128
    rows = -(-B // case.shards('batch'))
    return {
      **_reasons(case),
      'takes one query a row, without a window': T != 1 or case.softmax.window > 0,
      f'takes head widths that are multiples of 8, up to {largest}, and values as wide': (
        width % 8 != 0 or width > largest or case.v.shape[3] != width
      ),
      'is for many rows': rows * K // case.shards('act_heads') < _LEAST_HEADS,
    }

  def attend_locally(
    self,
    q_BTNH: jax.Array,
    k_BKSH: jax.Array,
    v_BKSH: jax.Array,
    start_B: jax.Array,
    logit_N: jax.Array | None,
    table_BW: jax.Array | None,
    softmax: Softmax,
  ) -> jax.Array:
    del table_BW
    (B, _, N, H), (_, K, S, _) = q_BTNH.shape, k_BKSH.shape
    context_BKGH, lse_BKG = cudnn_call.cached(
      q_BTNH.reshape(B, K, N // K, H), k_BKSH, v_BKSH, jnp.minimum(start_B + 1, S),
      softmax.query_scale, has_sums=logit_N is not None,
    )  # fmt: skip
    context_B1NH = context_BKGH.reshape(q_BTNH.shape)
    if lse_BKG is None:
      return context_B1NH
    part = Partial(context_B1NH.astype(jnp.float32), lse_BKG.reshape(B, N, 1))
    return with_sink_logit(part, logit_N).context.astype(v_BKSH.dtype)


def _reasons(case: Case) -> dict[str, bool]:
  """Returns reasons that hold for sequences and for cached keys."""
  return {
    'needs an NVIDIA GPU, Ampere or newer': case.capability < _LEAST_CAPABILITY,
    'knows no cap of the scores': case.softmax.logit_cap > 0,
    'computes in 16 bits only': case.q.dtype not in (jnp.bfloat16, jnp.float16),
  }


def _usual_segments(length: int) -> int:
  """Returns how many bounds rows get if it is not known how many segments they have.

  One for each 256 tokens, but at most 16: each bound costs blocks of threads that find no work. The
  program also has the bias for rows with more, so it is 0 where that would be large.
  """
  return min(max(length // 256, 2), 16) if length <= 8192 else 0


def _scores(call: KernelCall) -> tuple[int, ...]:
  """Returns the shape [B, N, T, S] of what the kernel never writes."""
  stated = re.search(r'"intermediate_tensor_shape":\s*(\{.*?"dimensions":\s*(\[.*?\]))', call.text)
  if stated:
    return tuple(int(n) for n in re.findall(r'\d+', stated[2]))
  (B, T, N, _), k = call.operands[:2]
  return B, N, T, k[1]


@dataclasses.dataclass(frozen=True)
class CudnnParts:
  """A PartialKernel of cuDNN, for a softmax without a cap, a window and an attention sink."""

  softmax: Softmax

  def forward(self, qkv: QKV, segments: Segments | None, causal: bool) -> Partial:
    """See PartialKernel."""

    def of_rows(q: jax.Array, k: jax.Array, v: jax.Array, *ids: jax.Array) -> Partial:
      bounds = (ids[0], ids[1]) if ids else None
      return cudnn_call.forward((q, k, v), bounds, self._options(causal))

    return folded(of_rows)(*qkv, *(segments or ()))

  def backward(
    self, qkv: QKV, segments: Segments | None, causal: bool, whole: Partial, gradient: jax.Array
  ) -> QKV:
    """See PartialKernel."""

    def of_rows(*arrays: jax.Array) -> QKV:
      q, k, v, context, lse, gradient, *ids = arrays
      bounds = (ids[0], ids[1]) if ids else None
      whole = Partial(context, lse)
      return cudnn_call.backward((q, k, v), bounds, self._options(causal), whole, gradient)[0]

    return folded(of_rows)(*qkv, *whole, gradient, *(segments or ()))

  def _options(self, causal: bool) -> cudnn_call.Options:
    return cudnn_call.Options(self.softmax.query_scale, causal=causal)
