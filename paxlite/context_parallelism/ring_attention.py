"""Causal attention of rows that are split over a mesh axis, with keys and values in a ring.

Every function here runs in a shard_map and sees the part of one device. Keys and values travel from
device to device while all devices compute; see https://arxiv.org/abs/2310.01889.

The work is balanced: of n devices, device i computes halves 2i and 2n − 1 − 2i of the 2n halves of
a row. It keeps the first half of its own part, and exchanges the second half with device n − 1 − i.
Then the mask by position leaves exactly half of the pairs that two devices have: either all queries
see one half of the keys, or one half of the queries sees all keys. So each step is one call of a
kernel, of the same size on all devices. A device leaves it out where no query is of the segment of
a key. Halves i and 2n − 1 − i would be balanced too, but both halves of a part would have to move.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeVar, TypeVarTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike

from paxlite.layers.attention.partial_attention import (
  QKV,
  RESULTS,
  Partial,
  PartialKernel,
  merged_by_lse,
  sink_logit_gradient,
  with_sink_logit,
)
from paxlite.layers.attention.softmax_attention import Segments

_T = TypeVar('_T')
_Ts = TypeVarTuple('_Ts')


class Ring(NamedTuple):
  """The devices of a ring."""

  axis: str  # their mesh axis
  size: int  # their number

  def next(self, *arrays: *_Ts) -> tuple[*_Ts]:
    """Returns the arrays of the device before this one."""
    return self._permuted(arrays, [(i, (i + 1) % self.size) for i in range(self.size)])

  def mirrored(self, x: jax.Array) -> jax.Array:
    """Returns the array of the mirror device: device n − 1 − i for device i of n."""
    return self._permuted((x,), [(i, self.size - 1 - i) for i in range(self.size)])[0]

  def _permuted(self, arrays: tuple[*_Ts], pairs: list[tuple[int, int]]) -> tuple[*_Ts]:
    return jax.tree.map(lambda x: jax.lax.ppermute(x, self.axis, pairs), arrays)


def attend(
  qkv: QKV, segment_ids_BT: jax.Array | None, logit_N: jax.Array | None, kernel: PartialKernel,
  ring: Ring,
) -> jax.Array:  # fmt: skip
  """Returns the context of this device's queries, [B, T, N, H].

  Args:
    qkv: This device's queries [B, T, N, H], keys and values [B, T, K, H]; T is even.
    segment_ids_BT: Its segments; None where there are none.
    logit_N: The logits of a virtual key whose value is 0; None where there is none.
    kernel: Computes halves of the queries with halves of the keys, or all of one of them.
    ring: The devices that share a row.
  """

  def exchanged(x: jax.Array) -> jax.Array:
    first, second = jnp.split(x, 2, axis=1)
    return jnp.concatenate([first, ring.mirrored(second)], axis=1)

  ids = None if segment_ids_BT is None else exchanged(segment_ids_BT)
  q, k, v = map(exchanged, qkv)
  return exchanged(_attend((q, k, v), logit_N, ids, kernel, ring))


# From here on, the tokens of an array [B, T, …] are two halves of T / 2, which are not neighbors in
# the row. `ids` are their segments.

_Keys = tuple[jax.Array, jax.Array, jax.Array | None]  # keys, values and segments that travel
# the arguments of _attend that are arrays, and its result
_Residuals = tuple[QKV, jax.Array | None, jax.Array | None, Partial]
_Half = ArrayLike | None  # the number of a half; None means both
# computes what the queries of a half see in the keys of a half
_Compute = Callable[[_Keys, _Half, _Half], _T]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _attend(
  qkv: QKV, logit_N: jax.Array | None, ids: jax.Array | None, kernel: PartialKernel, ring: Ring
) -> jax.Array:
  return _forward(qkv, logit_N, ids, kernel, ring)[0]


def _forward(
  qkv: QKV, logit_N: jax.Array | None, ids: jax.Array | None, kernel: PartialKernel, ring: Ring
) -> tuple[jax.Array, _Residuals]:
  q, k, v = qkv

  def seen(keys: _Keys, of_queries: _Half, of_keys: _Half) -> Partial:
    """Returns what a half of the queries sees in keys; the other half sees nothing."""
    of_q, of_k, of_v = _half(q, of_queries), _half(keys[0], of_keys), _half(keys[1], of_keys)
    segments = _segments(ids, keys, of_queries, of_keys)
    context, lse = kernel.forward((of_q, of_k, of_v), segments, False)
    return Partial(_placed(context, of_queries), _placed(lse, of_queries, 2, -jnp.inf))

  def added(sums: Partial, part: Partial) -> Partial:
    return merged_by_lse(Partial(part.context.astype(jnp.float32), part.lse), sums)

  nothing = (0.0, -jnp.inf)
  keys: _Keys = (k, v, ids)
  travelling = ring.next(*keys)
  own = kernel.forward((_rows(q), _rows(k), _rows(v)), _segments_of_rows(ids), True)
  sums = Partial(_from_rows(own.context).astype(jnp.float32), _from_rows(own.lse, 2))
  sums = added(sums, _own(seen, nothing, ids, keys, ring))

  def turn(carry: tuple[_Keys, Partial], step: jax.Array) -> tuple[tuple[_Keys, Partial], None]:
    keys, sums = carry
    part = _others(seen, nothing, ids, keys, ring, step)
    return (ring.next(*keys), added(sums, part)), None

  steps = jnp.arange(1, ring.size - 1)
  (travelling, sums), _ = jax.lax.scan(turn, (travelling, sums), steps)
  sums = added(sums, _others(seen, nothing, ids, travelling, ring, ring.size - 1))
  whole = with_sink_logit(sums, logit_N)
  whole = Partial(whole.context.astype(v.dtype), whole.lse)
  whole = jax.tree.map(lambda x: checkpoint_name(x, RESULTS), whole)
  return whole.context, (qkv, logit_N, ids, whole)


def _backward(
  kernel: PartialKernel, ring: Ring, res: _Residuals, gradient: jax.Array
) -> tuple[QKV, jax.Array | None, None]:
  (q, k, v), logit_N, ids, whole = res
  add = functools.partial(jax.tree.map, lambda sums, part: sums + part.astype(jnp.float32))

  def pulled(keys: _Keys, of_queries: _Half, of_keys: _Half) -> QKV:
    """Returns the gradients of queries, keys and values; 0 for those of other halves."""
    of_q, of_k, of_v = _half(q, of_queries), _half(keys[0], of_keys), _half(keys[1], of_keys)
    segments = _segments(ids, keys, of_queries, of_keys)
    of_whole = Partial(_half(whole.context, of_queries), _half(whole.lse, of_queries, 2))
    of_gradient = _half(gradient, of_queries)
    dq, dk, dv = kernel.backward((of_q, of_k, of_v), segments, False, of_whole, of_gradient)
    return _placed(dq, of_queries), _placed(dk, of_keys), _placed(dv, of_keys)

  nothing = (0.0, 0.0, 0.0)
  keys: _Keys = (k, v, ids)
  travelling = ring.next(*keys)
  of_whole = Partial(_rows(whole.context), _rows(whole.lse, 2))
  own = kernel.backward(
    (_rows(q), _rows(k), _rows(v)), _segments_of_rows(ids), True, of_whole, _rows(gradient)
  )
  dq, dk, dv = (_from_rows(x).astype(jnp.float32) for x in own)
  dq, dk, dv = add((dq, dk, dv), _own(pulled, nothing, ids, keys, ring))

  # the gradients of keys travel one step behind the keys, while the next ones are computed
  def turn(carry: tuple[_Keys, QKV], step: jax.Array) -> tuple[tuple[_Keys, QKV], None]:
    keys, (dq, dk, dv) = carry
    next_keys, so_far = ring.next(*keys), ring.next(dk, dv)
    found = _others(pulled, nothing, ids, keys, ring, step)
    return (next_keys, add((dq, *so_far), found)), None

  steps = jnp.arange(1, ring.size - 1)
  (travelling, (dq, dk, dv)), _ = jax.lax.scan(turn, (travelling, (dq, dk, dv)), steps)
  found = _others(pulled, nothing, ids, travelling, ring, ring.size - 1)
  dq, dk, dv = add((dq, *ring.next(dk, dv)), found)
  dk, dv = ring.next(dk, dv)
  d_logit = sink_logit_gradient(whole, gradient, logit_N)
  return (dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)), d_logit, None


_attend.defvjp(_forward, _backward)


def _own(
  compute: _Compute[_T], nothing: tuple[float, ...], ids: jax.Array | None, keys: _Keys, ring: Ring
) -> _T:
  """Computes what a device's later half sees in its earlier one."""
  later = jnp.where(2 * jax.lax.axis_index(ring.axis) >= ring.size, 0, 1)
  return _if_they_meet(compute, nothing, ids, keys, later, 1 - later)


def _others(
  compute: _Compute[_T],
  nothing: tuple[float, ...],
  ids: jax.Array | None,
  keys: _Keys,
  ring: Ring,
  step: jax.Array | int,
) -> _T:
  """Computes what a device's queries see in the keys that come at a step.

  These began `step` devices ago. Of device i, half 0 is number 2i and half 1 number 2n − 1 − 2i of
  the row. So half 0 sees half 0 of a device before it, half 1 sees half 1 of a device after it, and
  of two halves of different kinds, half 0 is the later one if the sum of the devices is n or more.
  """
  me = jax.lax.axis_index(ring.axis)
  other = (me - step) % ring.size
  half = jnp.where(other < me, 0, 1)
  later = jnp.where(me + other >= ring.size, 0, 1)
  by_halves = functools.partial(_if_they_meet, compute, nothing, ids, keys)
  # the later half sees both halves of the keys, or both halves of the queries see the same keys
  return jax.lax.cond(later == half, lambda: by_halves(half, None), lambda: by_halves(None, half))


def _if_they_meet(
  compute: _Compute[_T],
  nothing: tuple[float, ...],
  ids: jax.Array | None,
  keys: _Keys,
  of_queries: _Half,
  of_keys: _Half,
) -> _T:
  """Computes what queries see in keys if one of them may be of the segment of a key.

  Segments are numbered in the order of a row, and padding, 0, comes after them, so that the first
  and the last segment of a half decide. In any other order, what could be left out is computed.

  Args:
    nothing: The numbers that fill its results otherwise.
    ids: The segments of all queries; None where there are none.
    keys: The keys of a device.
  """
  results = functools.partial(compute, keys, of_queries, of_keys)
  segments = _segments(ids, keys, of_queries, of_keys)
  if segments is None or ids is None:
    return results()
  halves = (x.reshape(x.shape[0], -1, ids.shape[1] // 2) for x in segments)
  of_q, of_k = (jnp.where(x == 0, jnp.iinfo(x.dtype).max, x) for x in halves)
  of_q, of_k = of_q[:, :, None], of_k[:, None]
  meet = (of_q.min(-1) <= of_k.max(-1)) & (of_k.min(-1) <= of_q.max(-1))

  def filled() -> _T:
    leaves, tree = jax.tree.flatten(jax.eval_shape(results))
    arrays = [jnp.full(x.shape, n, x.dtype) for n, x in zip(nothing, leaves, strict=True)]
    return jax.tree.unflatten(tree, arrays)

  return jax.lax.cond(meet.any(), results, filled)


def _segments(
  ids: jax.Array | None, keys: _Keys, of_queries: _Half, of_keys: _Half
) -> Segments | None:
  """Returns the segments of a half of the queries and of a half of the keys."""
  if ids is None or keys[2] is None:
    return None
  return _half(ids, of_queries), _half(keys[2], of_keys)


def _segments_of_rows(ids: jax.Array | None) -> Segments | None:
  """Returns the segments of halves as separate rows, for queries and for keys."""
  return None if ids is None else (_rows(ids), _rows(ids))


def _half(x: jax.Array, number: _Half, axis: int = 1) -> jax.Array:
  """Returns a half of the tokens of an array, or both."""
  if number is None:
    return x
  size = x.shape[axis] // 2
  return jax.lax.dynamic_slice_in_dim(x, number * size, size, axis)


def _placed(x: jax.Array, number: _Half, axis: int = 1, other: float = 0.0) -> jax.Array:
  """Returns an array of all tokens with x at its half, and a number at the other half."""
  if number is None:
    return x
  shape = list(x.shape)
  is_there = (jnp.arange(2) == number).reshape([2] + [1] * (x.ndim - axis))
  both = jnp.where(is_there, jnp.expand_dims(x, axis), jnp.asarray(other, x.dtype))
  return both.reshape([*shape[:axis], 2 * shape[axis], *shape[axis + 1 :]])


def _rows(x: jax.Array, axis: int = 1) -> jax.Array:
  """Returns the halves of an array as separate rows, [2 · B, …, T / 2, …]."""
  shape = x.shape
  x = x.reshape([*shape[:axis], 2, shape[axis] // 2, *shape[axis + 1 :]])
  return jnp.moveaxis(x, axis, 1).reshape([2 * shape[0], *x.shape[1:axis], *x.shape[axis + 1 :]])


def _from_rows(x: jax.Array, axis: int = 1) -> jax.Array:
  """Undoes `_rows`."""
  shape = x.shape
  x = jnp.moveaxis(x.reshape([shape[0] // 2, 2, *shape[1:]]), 1, axis)
  return x.reshape([shape[0] // 2, *shape[1:axis], 2 * shape[axis], *shape[axis + 1 :]])
