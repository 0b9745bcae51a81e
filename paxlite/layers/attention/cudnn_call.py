"""cuDNN's attention as XLA calls it, for packed rows, attention sinks and learned biases.

jax.nn.dot_product_attention turns a mask into a bias and asks cuDNN for its gradient [B, 1, T, T],
which nobody uses. XLA can leave this result out, and cuDNN can take the bounds of the segments
instead of a bias. And JAX rounds the sums of the softmax to 16 bits; an attention sink and the
parts of a ring need them in float32. The operands, results and configuration of these calls are
those that XLA's cudnn_custom_call_compiler.cc reads.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from paxlite.layers.attention.partial_attention import (
  QKV,
  Partial,
  sink_logit_gradient,
  with_sink_logit,
)
from paxlite.layers.attention.softmax_attention import Segments

MORE_SEGMENTS = 'more_segments_than_bounds'  # the scope of what is computed in no usual step
_HEADS_INSIDE = (0, 2, 1, 3)  # results [B, N, T, H] whose memory is that of [B, T, N, H]
# XLA's name of a type, and the bias of keys in other segments
_TYPES = {'bfloat16': ('BF16', -(2.0**41)), 'float16': ('F16', -(2.0**15))}


@dataclasses.dataclass(frozen=True)
class Options:
  """The shared arguments of the forward and backward kernels."""

  scale: float  # factor of the scores
  # a query sees this many of the latest keys, including its own; ≤ 0 means all keys
  window: int = 0
  # If it is above 0, the kernels get the bounds of the segments, at most so many in a row on
  # average. Scores between segments are not computed, and the sums of the softmax take [B ·
  # max_segments, N, T] float32. 0 means a bias.
  max_segments: int = 0
  # Whether `attend` takes a bias for rows with more segments than `max_segments`. Without, their
  # context is NaN.
  bias_for_more: bool = False
  # whether a query sees the keys up to its own index alone; without, no window and no
  # `max_segments`
  causal: bool = True
  # whether each row has a number of keys; with, it is not causal and there is no `max_segments`
  has_lengths: bool = False


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def attend(
  qkv: QKV, segment_ids_BT: jax.Array | None, logit_BN: jax.Array | None,
  bias_1NTS: jax.Array | None, options: Options,
) -> jax.Array:  # fmt: skip
  """Causal attention within segments on one device, [B, T, N, H].

  Args:
    qkv: Queries [B, T, N, H], keys and values [B, T, K, H], bfloat16 or float16; N / K neighboring
      query heads share a key head.
    segment_ids_BT: Segment ids. With `max_segments`, a segment is a run of neighbors of the same
      id, and the rows together have at most B · max_segments of them; see Options.bias_for_more.
      None where there are no segments.
    logit_BN: The logit of a virtual key whose value is 0, float32, without `max_segments`; None
      where there is none.
    bias_1NTS: A bias of the scores in the type of the queries, where there are no segments; None
      where there is none.
    options: The scale, the window and the form in which cuDNN gets the segments.
  """
  return _attend_forward(qkv, segment_ids_BT, logit_BN, bias_1NTS, options)[0]


def _attend_forward(
  qkv: QKV, ids_BT: jax.Array | None, logit_BN: jax.Array | None, bias_1NTS: jax.Array | None,
  options: Options,
) -> tuple[jax.Array, tuple]:  # fmt: skip
  q_BTNH, k_BTKH, v_BTKH = qkv
  assert ids_BT is None or bias_1NTS is None
  if options.max_segments:
    assert ids_BT is not None
    assert logit_BN is None
    if not options.bias_for_more:
      q_BTNH *= jnp.where(_fit(ids_BT, options), 1, jnp.nan).astype(q_BTNH.dtype)
  kernel = functools.partial(forward, bias_1NTS=bias_1NTS)
  whole = _by_bounds_or_bias(kernel, (q_BTNH, k_BTKH, v_BTKH), ids_BT, options)
  if logit_BN is not None:
    whole = with_sink_logit(Partial(whole.context.astype(jnp.float32), whole.lse), logit_BN)
    whole = Partial(whole.context.astype(v_BTKH.dtype), whole.lse)
  return whole.context, ((q_BTNH, k_BTKH, v_BTKH), ids_BT, logit_BN, bias_1NTS, whole)


def _attend_backward(
  options: Options, res: tuple, d_context_BTNH: jax.Array
) -> tuple[QKV, None, jax.Array | None, jax.Array | None]:
  qkv, ids_BT, logit_BN, bias_1NTS, whole = res
  kernel = functools.partial(backward, bias_1NTS=bias_1NTS)
  gradients, d_bias = _by_bounds_or_bias(kernel, qkv, ids_BT, options, whole, d_context_BTNH)
  return gradients, None, sink_logit_gradient(whole, d_context_BTNH, logit_BN), d_bias


attend.defvjp(_attend_forward, _attend_backward)


def _fit(ids_BT: jax.Array, options: Options) -> jax.Array:
  """Returns whether the rows have no more segments than there are bounds."""
  B = ids_BT.shape[0]
  return (ids_BT[:, 1:] != ids_BT[:, :-1]).sum() + B <= B * options.max_segments


def _by_bounds_or_bias(
  kernel: Callable[..., Any], qkv: QKV, ids_BT: jax.Array | None, options: Options, *others: Any
) -> Any:
  """Calls `forward` or `backward`, on the device with a bias if there are too many segments.

  Both branches return and take the log-sums of bounds, [B · max_segments, N, T]. Those of a bias
  are the first B of them, and the others are 0.
  """
  segments = None if ids_BT is None else (ids_BT, ids_BT)
  if ids_BT is None or not (options.max_segments and options.bias_for_more):
    return kernel(qkv, segments, options, *others)
  B, by_bias = ids_BT.shape[0], dataclasses.replace(options, max_segments=0)

  def of_bounds(qkv: QKV) -> Any:
    return kernel(qkv, segments, options, *others)

  @jax.named_scope(MORE_SEGMENTS)
  def of_bias(qkv: QKV) -> Any:
    narrow = [Partial(x.context, x.lse[:B]) if isinstance(x, Partial) else x for x in others]
    found = kernel(qkv, segments, by_bias, *narrow)
    if not isinstance(found, Partial):
      return found
    unused = [(0, B * (options.max_segments - 1)), (0, 0), (0, 0)]
    return Partial(found.context, jnp.pad(found.lse, unused))

  return jax.lax.cond(_fit(ids_BT, options), of_bounds, of_bias, qkv)


def forward(
  qkv: QKV, segments: Segments | None, options: Options, bias_1NTS: jax.Array | None = None
) -> Partial:
  """Returns the context and the log-sums of a part of the keys, without a derivative.

  With `max_segments`, the log-sums are [B · max_segments, N, T], in an order of cuDNN's own.
  """
  q_BTNH, k_BSKH, v_BSKH = qkv
  B, T, N, H = q_BTNH.shape
  bias, limits = _segments(q_BTNH, k_BSKH, segments, options)
  bias += [] if bias_1NTS is None else [bias_1NTS]
  call = _call(
    f'{"ScaleBias" if bias else ""}Softmax', options, q_BTNH.dtype, _scores(q_BTNH, k_BSKH),
    [(B, N, T, H)],
    [jax.ShapeDtypeStruct((B * max(options.max_segments, 1), N, T), jnp.float32)],
    bmm1=((3, 3), (0, 2), (0, 2)), bmm2=((3, 1), (0, 1), (0, 2)),
  )  # fmt: skip
  context_BNTH, sums, _ = call(q_BTNH, k_BSKH, v_BSKH, *bias, *limits)
  return Partial(context_BNTH.swapaxes(1, 2), sums)


def cached(
  q_BKGH: jax.Array, k_BKSH: jax.Array, v_BKSH: jax.Array, length_B: jax.Array, scale: float,
  has_sums: bool,
) -> tuple[jax.Array, jax.Array | None]:  # fmt: skip
  """Returns the context [B, K, G, H], and the log-sums [B, K, G] or None, without a derivative.

  The G query heads of a head of keys are queries of one head, so that its keys are read once.

  Args:
    q_BKGH: One query a row of each head.
    k_BKSH: Keys, in the order of a cache.
    v_BKSH: Their values.
    length_B: How many keys each row has.
    scale: The factor of the scores.
    has_sums: Whether the log-sums are computed.
  """
  (B, K, G, _), S = q_BKGH.shape, k_BKSH.shape[2]
  sums = [jax.ShapeDtypeStruct((B, K, G), jnp.float32)] * has_sums
  call = _call(
    'Softmax', Options(scale, causal=False, has_lengths=True), q_BKGH.dtype, (B, K, G, S),
    [q_BKGH.shape], sums, layout=None, bmm1=((3, 3), (0, 1), (0, 1)), bmm2=((3, 2), (0, 1), (0, 1)),
  )  # fmt: skip
  context_BKGH, *others = call(q_BKGH, k_BKSH, v_BKSH, jnp.full_like(length_B, G), length_B)
  return context_BKGH, others[0] if has_sums else None


def backward(
  qkv: QKV, segments: Segments | None, options: Options, whole: Partial,
  d_context_BTNH: jax.Array, bias_1NTS: jax.Array | None = None,
) -> tuple[QKV, jax.Array | None]:  # fmt: skip
  """Returns the gradients of queries, keys, values and a learned bias.

  Args:
    qkv: Queries, a part of the keys, and their values.
    segments: Segments of the queries and of the keys; None where there are none.
    options: The options of the forward pass.
    whole: The context and the log-sums of all keys, that of an attention sink too.
    d_context_BTNH: The gradient of the context.
    bias_1NTS: A learned bias, or None.
  """
  q_BTNH, k_BSKH, v_BSKH = qkv
  (B, T, N, H), (_, S, K, _) = q_BTNH.shape, k_BSKH.shape
  bias, limits = _segments(q_BTNH, k_BSKH, segments, options)
  learned = [] if bias_1NTS is None else [bias_1NTS]
  bias += learned
  call = _call(
    f'{"ScaleBias" if bias else ""}SoftmaxBackward', options, q_BTNH.dtype, _scores(q_BTNH, k_BSKH),
    [(B, N, T, H), (B, K, S, H), (B, K, S, H)],
    [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in learned],
    bmm1_grad_gemm1=((2, 1), (0, 1), (0, 2)), bmm1_grad_gemm2=((3, 1), (0, 1), (0, 2)),
    bmm2_grad_gemm1=((2, 1), (0, 1), (0, 2)), bmm2_grad_gemm2=((3, 3), (0, 2), (0, 2)),
  )  # fmt: skip
  context_BTNH, sums = whole
  results = call(q_BTNH, k_BSKH, v_BSKH, sums, d_context_BTNH, *bias, context_BTNH, *limits)
  dq, dk, dv = (g.swapaxes(1, 2) for g in results[:3])
  return (dq, dk, dv), results[3] if learned else None


def _segments(
  q_BTNH: jax.Array, k_BSKH: jax.Array, segments: Segments | None, options: Options
) -> tuple[list[jax.Array], list[jax.Array]]:
  """Returns the operands that tell cuDNN the segments: a bias [B, 1, T, S], or their bounds."""
  if segments is None:
    return [], []
  of_q_BT, of_k_BS = segments
  if not options.max_segments:
    same_B1TS = (of_q_BT[:, :, None] == of_k_BS[:, None, :])[:, None]
    masked = jnp.asarray(_TYPES[q_BTNH.dtype.name][1], q_BTNH.dtype)
    return [jnp.where(same_B1TS, jnp.zeros_like(masked), masked)], []
  starts, lengths = bounds(of_q_BT, options.max_segments)
  heads = q_BTNH.shape[2], k_BSKH.shape[2]
  # cuDNN counts elements; grouped heads have fewer of them in a token of keys
  offsets = [starts * (n * q_BTNH.shape[3]) for n in heads]
  return [], [lengths, lengths, *offsets]


def bounds(ids_BT: jax.Array, max_segments: int) -> tuple[jax.Array, jax.Array]:
  """Returns where segments start and how long they are, in the order of the rows.

  Padding is a segment too, as cuDNN writes no results for tokens outside of all segments.

  Args:
    ids_BT: Segment ids.
    max_segments: M. All rows together have at most B · M segments.

  Returns:
    The first tokens [B, M + 1] int32, counted through all rows and filled with B · T; and the
    lengths in tokens [B, M] int32, filled with 0.
  """
  B, T = ids_BT.shape
  is_start_BT = jnp.ones((B, T), bool).at[:, 1:].set(ids_BT[:, 1:] != ids_BT[:, :-1])
  size = B * (max_segments + 1)
  starts = jnp.nonzero(is_start_BT.ravel(), size=size, fill_value=B * T)[0].astype(jnp.int32)
  lengths = jnp.diff(starts[: B * max_segments + 1])
  return starts.reshape(B, -1), lengths.reshape(B, -1)


def _scores(q_BTNH: jax.Array, k_BSKH: jax.Array) -> tuple[int, ...]:
  """Returns the shape [B, N, T, S] of the scores."""
  (B, T, N, _), S = q_BTNH.shape, k_BSKH.shape[1]
  assert q_BTNH.dtype == k_BSKH.dtype
  assert T % 2 == S % 2 == 0, (T, S)  # cuDNN has no backward kernel for odd lengths with a bias
  return B, N, T, S


def _call(
  kind: str,
  options: Options,
  dtype: jnp.dtype,
  scores: tuple[int, ...],
  shapes: list[tuple[int, ...]],
  others: list[jax.ShapeDtypeStruct],
  layout: tuple[int, ...] | None = _HEADS_INSIDE,
  **products: tuple[tuple[int, int], tuple[int, int], tuple[int, int]],
) -> Callable[..., Sequence[jax.Array]]:
  """Returns a function that calls cuDNN.

  Args:
    kind: The last part of the call's name.
    options: The options of the kernel.
    dtype: The type of queries, keys and values.
    scores: The shape of the scores, [B, N, T, S].
    shapes: Shapes of the results that have this type.
    others: The other results, before the workspace.
    layout: The layout of the former in memory; None: that of their shapes.
    **products: The dimensions of each matrix multiplication that are contracted, and those of the
      batch of its left and its right operand.
  """
  mask = 'CAUSAL' if options.causal else 'PADDING' if options.has_lengths else 'NO_MASK'
  if options.max_segments:
    assert options.causal
    assert scores[2] == scores[3]
    mask = 'PADDING_CAUSAL'
  numbers = {
    f'{name}_dot_dimension_numbers': {
      'lhs_contracting_dimensions': [str(contracted[0])],
      'rhs_contracting_dimensions': [str(contracted[1])],
      'lhs_batch_dimensions': [str(n) for n in left],
      'rhs_batch_dimensions': [str(n) for n in right],
    }
    for name, (contracted, left, right) in products.items()
  }
  config = {
    'algorithm': {
      'algo_id': '0', 'math_type': 'TENSOR_OP_MATH', 'tuning_knobs': {'17': '1', '24': '0'},
      'is_cudnn_frontend': True, 'workspace_size': '0',
    },
    'fmha_scale': options.scale,
    'intermediate_tensor_shape': {
      'element_type': _TYPES[dtype.name][0], 'dimensions': [str(n) for n in scores],
      'layout': {'minor_to_major': ['3', '2', '1', '0']}, 'is_dynamic_dimension': [False] * 4,
    },
    'is_flash_attention': True,
    'mask_type': mask,
    'dropout_rate': 0.0,
    'seed': 42,
    'sliding_window_length': max(options.window, 0),
    'max_seg_per_batch': max(options.max_segments, 1),
    'is_paged_attention': False,
  }  # fmt: skip
  workspace = jax.ShapeDtypeStruct((0,), jnp.uint8)
  results = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
  return jax.ffi.ffi_call(
    f'__cudnn$fmha{kind}', [*results, *others, workspace],
    output_layouts=[layout] * len(shapes) + [None] * (len(others) + 1),
    vmap_method='sequential', custom_call_api_version=2,
    legacy_backend_config=json.dumps({'cudnn_fmha_backend_config': config | numbers}),
  )  # fmt: skip
