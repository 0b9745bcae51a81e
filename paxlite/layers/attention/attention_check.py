"""Compares small cases of what cuDNN computes on a GPU with the same in another way.

From Hopper on, cuDNN gets the bounds of segments instead of a mask in most models. A version of
JAX was seen to pass wrong bounds for grouped heads, which gave wrong results without any error. An
attention sink and a ring read the sums of the softmax, and give others to the backward kernel. A
learned bias has a gradient.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from paxlite.core.errors import UserError
from paxlite.layers.attention import attention_kernels, cudnn_call, softmax_attention
from paxlite.layers.attention.attention_case import Case
from paxlite.layers.attention.blockwise_attention import Blockwise
from paxlite.layers.attention.cudnn_attention import CudnnKernel, CudnnParts
from paxlite.layers.attention.partial_attention import Partial, PartialKernel, merged_by_lse
from paxlite.layers.attention.softmax_attention import AttentionMask, Softmax
from paxlite.parallel.devices import capability, kind

_TOLERANCE = 0.05  # relative to the largest entry; bfloat16 gives about 0.01, wrong bounds 1
_B, _T, _N, _K, _H = 2, 256, 4, 2, 64
_SCALE = _H**-0.5


class _Compared(NamedTuple):
  """A function that computes results and gradients, and its arguments.

  They are not constants of the function, which XLA would compute with slowly while it compiles.
  """

  function: Callable[..., Sequence[jax.Array]]
  arrays: Sequence[jax.Array]


class FusedAttention(Protocol):
  """What an experiment asks of cuDNN's kernels."""

  @property
  def attention_segments(self) -> int | None:
    """The most segments of a packed row, whose bounds cuDNN gets; see Case.max_segments."""

  @property
  def has_fused_logits(self) -> bool:
    """Whether heads have an attention sink."""

  @property
  def has_fused_bias(self) -> bool:
    """Whether the scores have a learned bias."""

  @property
  def has_fused_ring(self) -> bool:
    """Whether rows may be computed in parts."""


def check_attention(asked: FusedAttention, mesh: Mesh) -> None:
  """Compares small attentions and their gradients, if a run computes them by cuDNN.

  Raises:
    UserError: They differ.
  """
  device = mesh.local_devices[0]
  array, ids_BT = jax.ShapeDtypeStruct((_B, _T, _N, _H), jnp.bfloat16), _segment_ids()
  case = Case(
    array, array, array, Softmax(_SCALE), AttentionMask(segments=(ids_BT, ids_BT)),
    max_segments=asked.attention_segments, platform=kind(device.platform),
    capability=capability(device), over_context=True,
  )  # fmt: skip
  kernel = CudnnKernel()
  if attention_kernels.refusal(kernel, case):
    return
  with jax.default_device(device):
    if kernel.bounds(case):
      what = 'attention by the bounds of segments'
      _check(_packed(), what, 'with a bias', 'MAX_SEGMENTS_PER_SEQ=0')
    if asked.has_fused_logits:
      what = 'attention with a sink'
      _check(_logits(), what, 'in plain XLA', 'USE_FLASH_ATTENTION=False')
    if asked.has_fused_bias:
      _check(_biases(), 'attention with a bias', 'in plain XLA', 'USE_FLASH_ATTENTION=False')
    if asked.has_fused_ring:
      _check(_rings(), 'attention in a ring', 'in plain XLA', 'CONTEXT_ATTENTION=heads')


def _check(
  cases: Iterator[tuple[_Compared, _Compared]], what: str, other: str, way_out: str
) -> None:
  """Raises UserError if the two computations of a case differ."""
  wrong = float(np.max([largest_difference(*both) for both in cases]))
  if not wrong <= _TOLERANCE:
    raise UserError(
      f'{what} by cuDNN (jax {jax.__version__}) differs from the same {other} by {wrong:.1g} of '
      f'the largest entry. Leave it out: {way_out}'
    )


def largest_difference(one: _Compared, other: _Compared) -> float:
  """Returns the largest difference of results, relative to each one's largest entry, or NaN."""
  both = zip(*(jax.jit(case.function)(*case.arrays) for case in (one, other)), strict=True)
  return float(np.max([_difference(*pair) for pair in both]))  # max() would leave out a NaN


def _difference(got: jax.Array, expected: jax.Array) -> float:
  found, right = (np.asarray(x.astype(jnp.float32)) for x in (got, expected))
  return float(np.abs(found - right).max() / np.abs(right).max())


def _random(seed: int, tokens: int, heads: int) -> jax.Array:
  rng = np.random.default_rng(seed)
  return jnp.asarray(rng.normal(size=(_B, tokens, heads, _H)), jnp.bfloat16)


def _segment_ids() -> jax.Array:
  """Returns the segment ids of rows with several segments, one of them with padding."""
  ids_BT = np.ones((_B, _T), np.int32)
  ids_BT[0, 100:] = 2
  ids_BT[1, 37:101], ids_BT[1, 101:229], ids_BT[1, 229:] = 2, 3, 0
  return jnp.asarray(ids_BT)


def _with_gradients(attend: Callable[..., jax.Array], *arrays: jax.Array) -> _Compared:
  """Returns the computation of the context and of the gradients of all arrays."""

  def function(gradient: jax.Array, *arrays: jax.Array) -> Sequence[jax.Array]:
    context, pull = jax.vjp(attend, *arrays)
    return context, *pull(gradient)

  return _Compared(function, (_random(3, _T, _N), *arrays))


def _packed() -> Iterator[tuple[_Compared, _Compared]]:
  qkv, ids_BT = [_random(i, _T, n) for i, n in enumerate((_N, _K, _K))], _segment_ids()

  def case(options: cudnn_call.Options) -> _Compared:
    attend = lambda q, k, v: cudnn_call.attend(q, k, v, ids_BT, None, None, options)
    return _with_gradients(attend, *qkv)

  by_bias = case(cudnn_call.Options(_SCALE))
  yield case(cudnn_call.Options(_SCALE, max_segments=4)), by_bias
  yield case(cudnn_call.Options(_SCALE, max_segments=2, bias_for_more=True)), by_bias


def _logits() -> Iterator[tuple[_Compared, _Compared]]:
  for window, ids_BT in ((0, _segment_ids()), (64, _segment_ids()), (0, None)):
    yield _logit_case(ids_BT, window, is_fused=True), _logit_case(ids_BT, window, is_fused=False)


def _logit_case(ids_BT: jax.Array | None, window: int, *, is_fused: bool) -> _Compared:
  segments = None if ids_BT is None else (ids_BT, ids_BT)

  def attend(q: jax.Array, k: jax.Array, v: jax.Array, logit_N: jax.Array) -> jax.Array:
    softmax = Softmax(_SCALE, window=window, sink_logit=logit_N)
    if is_fused:
      return CudnnKernel().attend_locally(Case(q, k, v, softmax, AttentionMask(segments=segments)))
    mask = AttentionMask(window=window, segments=segments).mask(_T, _T)
    return softmax_attention.attend(q, k, v, mask, None, softmax)

  qkv = [_random(i, _T, n) for i, n in enumerate((_N, _K, _K))]
  return _with_gradients(attend, *qkv, jnp.asarray([4.0, -2.0, 0.0, 2.0]))


def _biases() -> Iterator[tuple[_Compared, _Compared]]:
  mask = AttentionMask().mask(_T, _T)
  bias_1NTS = jnp.asarray(np.random.default_rng(4).normal(size=(1, _N, _T, _T)), jnp.bfloat16)
  arrays = *(_random(i, _T, n) for i, n in enumerate((_N, _K, _K))), bias_1NTS
  for sink in (None, 0.0):
    softmax = Softmax(_SCALE, sink_logit=sink)
    fused = lambda q, k, v, bias, s=softmax: CudnnKernel().attend_locally(
      Case(q, k, v, s, bias=bias)
    )
    plain = lambda q, k, v, bias, s=softmax: softmax_attention.attend(q, k, v, mask, bias, s)
    yield _with_gradients(fused, *arrays), _with_gradients(plain, *arrays)


def _rings() -> Iterator[tuple[_Compared, _Compared]]:
  softmax = Softmax(_SCALE)
  for earlier in (2 * _T, _T // 2):
    for is_packed in (False, True):
      sizes = (_T, _N), (_T, _K), (_T, _K), (_T, _N), (earlier, _K), (earlier, _K)
      arrays = [_random(seed, *size) for seed, size in enumerate(sizes)]
      one, other = (
        functools.partial(_two_parts, kernel(softmax), is_packed)
        for kernel in (CudnnParts, Blockwise)
      )
      yield _Compared(one, arrays), _Compared(other, arrays)


def _two_parts(
  kernel: PartialKernel,
  is_packed: bool,
  q: jax.Array,
  own_k: jax.Array,
  own_v: jax.Array,
  gradient: jax.Array,
  k: jax.Array,
  v: jax.Array,
) -> Sequence[jax.Array]:
  """Returns the context of queries that see their own keys and earlier ones, and all gradients.

  Where rows are packed, the earlier keys are of the first segment, which few queries see.
  """
  ids_BT = _segment_ids()
  of_own = (ids_BT, ids_BT) if is_packed else None
  of_before = (ids_BT, jnp.ones((_B, k.shape[1]), jnp.int32)) if is_packed else None
  own = kernel.forward(q, own_k, own_v, of_own, True)
  before = kernel.forward(q, k, v, of_before, False)
  in_float32 = (Partial(x.context.astype(jnp.float32), x.lse) for x in (own, before))
  whole = merged_by_lse(*in_float32)
  whole = Partial(whole.context.astype(q.dtype), whole.lse)
  return (
    whole.context,
    *kernel.backward(q, own_k, own_v, of_own, True, whole, gradient),
    *kernel.backward(q, k, v, of_before, False, whole, gradient),
  )
