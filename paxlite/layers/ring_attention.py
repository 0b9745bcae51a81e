"""Causal attention of rows that are split over a mesh axis, with keys and values in a ring.

Every function here runs in a shard_map and sees the part of one device. Keys and values travel from
device to device while all devices compute; see https://arxiv.org/abs/2310.01889.

The work is balanced: of n devices, device i computes halves 2i and 2n − 1 − 2i of the 2n halves of
a row. It keeps the first half of its own part, and exchanges the second half with device n − 1 − i.
Then each pair of devices has exactly two pairs of halves, and neither of them is masked by
position: halves of the same kind, from the device with the smaller index, and one of different
kinds. So each step is one call of a kernel for twice the rows, the same on all devices. A device
leaves it out where no query is of the segment of a key. Halves i
and 2n − 1 − i would be balanced too, but both halves of a part would have to move.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeVar, TypeVarTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike

from paxlite.layers.partial_attention import (
  Partial,
  PartKernel,
  extra_logit_gradient,
  part_of,
  together,
  updated,
  with_extra_logit,
)

_T = TypeVar('_T')
_Ts = TypeVarTuple('_Ts')
RESULTS = 'ring_attention'  # the checkpoint name of what the backward pass reads


class Ring(NamedTuple):
  """The devices of a ring.

  Attributes:
    axis: Their mesh axis.
    size: Their number.
  """

  axis: str
  size: int

  def next(self, *arrays: *_Ts) -> tuple[*_Ts]:
    """Returns the arrays of the device before this one."""
    return self._permuted(arrays, [(i, (i + 1) % self.size) for i in range(self.size)])

  def mirrored(self, x: jax.Array) -> jax.Array:
    """Returns the array of the mirror device: device n − 1 − i for device i of n."""
    return self._permuted((x,), [(i, self.size - 1 - i) for i in range(self.size)])[0]

  def _permuted(self, arrays: tuple[*_Ts], pairs: list[tuple[int, int]]) -> tuple[*_Ts]:
    return jax.tree.map(lambda x: jax.lax.ppermute(x, self.axis, pairs), arrays)


def attend(
  q_BTNH: jax.Array,
  k_BTKH: jax.Array,
  v_BTKH: jax.Array,
  segment_ids_BT: jax.Array | None,
  logit_N: jax.Array | None,
  kernel: PartKernel,
  ring: Ring,
) -> jax.Array:
  """Returns the context of this device's queries, [B, T, N, H].

  Args:
    q_BTNH: This device's queries; T is even.
    k_BTKH: Its keys.
    v_BTKH: Its values.
    segment_ids_BT: Its segments; None where there are none.
    logit_N: The logits of a virtual key whose value is 0; None where there is none.
    kernel: Computes a half of queries with a half of keys.
    ring: The devices that share a row.
  """

  def halves(x: jax.Array) -> jax.Array:
    first, second = jnp.split(x, 2, axis=1)
    return jnp.stack([first, ring.mirrored(second)])

  ids = None if segment_ids_BT is None else halves(segment_ids_BT)
  context = _attend(halves(q_BTNH), halves(k_BTKH), halves(v_BTKH), logit_N, ids, kernel, ring)
  return jnp.concatenate([context[0], ring.mirrored(context[1])], axis=1)


# From here on, arrays are [2, B, T / 2, …]: two halves. `ids` are the segments of the halves.

_Keys = tuple[jax.Array, jax.Array, jax.Array | None]  # keys, values and segments that travel
_KeyGradients = tuple[jax.Array, jax.Array]  # of keys and values
# the arguments of _attend that are arrays, and its result
_Kept = tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, jax.Array | None, Partial]
# numbers of a half of queries and of the half of keys that it sees
_Pairs = list[tuple[ArrayLike, ArrayLike]]


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _attend(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  logit_N: jax.Array | None,
  ids: jax.Array | None,
  kernel: PartKernel,
  ring: Ring,
) -> jax.Array:
  return _forward(q, k, v, logit_N, ids, kernel, ring)[0]


def _forward(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  logit_N: jax.Array | None,
  ids: jax.Array | None,
  kernel: PartKernel,
  ring: Ring,
) -> tuple[jax.Array, _Kept]:
  def seen(sums: Partial | None, keys: _Keys, pairs: _Pairs, causal: bool = False) -> Partial:
    """Adds to the sums of queries what they see in pairs of halves."""
    of_q, (of_k, of_v, of_ids) = _queries(q, pairs), _keys(keys, pairs)
    both = None if ids is None or of_ids is None else (_queries(ids, pairs), of_ids)
    parts = _apart(kernel.forward(of_q, of_k, of_v, both, causal), len(pairs))
    parts = [Partial(part.context.astype(jnp.float32), part.log_sum) for part in parts]
    if sums is None:
      return jax.tree.map(lambda *halves: jnp.stack(halves), *parts)
    for (half, _), part in zip(pairs, parts, strict=True):
      sums = updated(sums, half, functools.partial(together, part))
    return sums

  keys: _Keys = (k, v, ids)
  travelling = ring.next(*keys)
  sums = seen(None, keys, [(0, 0), (1, 1)], causal=True)

  def following(sums: Partial, keys: _Keys, pairs: _Pairs) -> Partial:
    return _if_they_meet(ids, keys, pairs, lambda: seen(sums, keys, pairs), lambda: sums)

  sums = following(sums, keys, _own_pairs(ring))

  def turn(carry: tuple[_Keys, Partial], step: jax.Array) -> tuple[tuple[_Keys, Partial], None]:
    keys, sums = carry
    return (ring.next(*keys), following(sums, keys, _pairs(ring, step))), None

  steps = jnp.arange(1, ring.size - 1)
  (travelling, sums), _ = jax.lax.scan(turn, (travelling, sums), steps)
  sums = following(sums, travelling, _pairs(ring, ring.size - 1))
  whole = jax.vmap(with_extra_logit, (0, None))(sums, logit_N)
  whole = Partial(whole.context.astype(v.dtype), whole.log_sum)
  whole = jax.tree.map(lambda x: checkpoint_name(x, RESULTS), whole)
  return whole.context, (q, k, v, logit_N, ids, whole)


def _backward(
  kernel: PartKernel, ring: Ring, kept: _Kept, gradient: jax.Array
) -> tuple[jax.Array | None, ...]:
  q, k, v, logit_N, ids, whole = kept
  add = functools.partial(jax.tree.map, jnp.add)

  def pulled(
    dq: jax.Array, keys: _Keys, pairs: _Pairs, causal: bool = False
  ) -> tuple[jax.Array, _KeyGradients]:
    """Adds to dq, and returns the gradients of these keys and values."""
    of_q, (of_k, of_v, of_ids) = _queries(q, pairs), _keys(keys, pairs)
    both = None if ids is None or of_ids is None else (_queries(ids, pairs), of_ids)
    of_whole = Partial(*(_queries(x, pairs) for x in whole))
    found = kernel.backward(of_q, of_k, of_v, both, causal, of_whole, _queries(gradient, pairs))
    parts = _apart(tuple(x.astype(jnp.float32) for x in found), len(pairs))
    dkv = (jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32))
    for (of_queries, of_keys), (dq_part, *dkv_part) in zip(pairs, parts, strict=True):
      dq = updated(dq, of_queries, functools.partial(add, dq_part))
      dkv = updated(dkv, of_keys, functools.partial(add, tuple(dkv_part)))
    return dq, dkv

  keys: _Keys = (k, v, ids)
  travelling = ring.next(*keys)
  dq, dkv = pulled(jnp.zeros(q.shape, jnp.float32), keys, [(0, 0), (1, 1)], causal=True)

  def following(
    dq: jax.Array, dkv: _KeyGradients, keys: _Keys, pairs: _Pairs
  ) -> tuple[jax.Array, _KeyGradients]:
    def changed() -> tuple[jax.Array, _KeyGradients]:
      new, more = pulled(dq, keys, pairs)
      return new, add(dkv, more)

    return _if_they_meet(ids, keys, pairs, changed, lambda: (dq, dkv))

  dq, dkv = following(dq, dkv, keys, _own_pairs(ring))

  # the gradients of keys travel one step behind the keys, while the next ones are computed
  def turn(
    carry: tuple[_Keys, _KeyGradients, jax.Array], step: jax.Array
  ) -> tuple[tuple[_Keys, _KeyGradients, jax.Array], None]:
    keys, dkv, dq = carry
    next_keys, so_far = ring.next(*keys), ring.next(*dkv)
    dq, dkv = following(dq, so_far, keys, _pairs(ring, step))
    return (next_keys, dkv, dq), None

  steps = jnp.arange(1, ring.size - 1)
  (travelling, dkv, dq), _ = jax.lax.scan(turn, (travelling, dkv, dq), steps)
  dq, dkv = following(dq, ring.next(*dkv), travelling, _pairs(ring, ring.size - 1))
  dk, dv = ring.next(*dkv)
  d_logit = extra_logit_gradient(
    Partial(*(jnp.concatenate(list(x)) for x in whole)), jnp.concatenate(list(gradient)), logit_N
  )
  return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), d_logit, None


_attend.defvjp(_forward, _backward)


def _own_pairs(ring: Ring) -> _Pairs:
  """Returns the two different halves of a device: the later one sees the earlier one."""
  later = jnp.where(2 * jax.lax.axis_index(ring.axis) >= ring.size, 0, 1)
  return [(later, 1 - later)]


def _pairs(ring: Ring, step: jax.Array | int) -> _Pairs:
  """Returns the pairs of halves with the keys that come at a step, which began `step` devices ago.

  Of device i, half 0 is number 2i and half 1 number 2n − 1 − 2i of the row.
  """
  me = jax.lax.axis_index(ring.axis)
  other = (me - step) % ring.size
  same = jnp.where(other < me, 0, 1)
  later = jnp.where(me + other >= ring.size, 0, 1)
  return [(same, same), (later, 1 - later)]


def _if_they_meet(
  ids: jax.Array | None,
  keys: _Keys,
  pairs: _Pairs,
  then: Callable[[], _T],
  or_else: Callable[[], _T],
) -> _T:
  """Returns `then()` if a query of these pairs may be of the segment of a key, else `or_else()`.

  Segments are numbered in the order of a row, and padding, 0, comes after them, so that the first
  and the last segment of a half decide. In any other order, what could be left out is computed.
  """
  if ids is None:
    return then()
  of_q, (_, _, of_k) = _queries(ids, pairs), _keys(keys, pairs)
  assert of_k is not None
  of_q, of_k = (jnp.where(x == 0, jnp.iinfo(x.dtype).max, x) for x in (of_q, of_k))
  meet = (of_q.min(1) <= of_k.max(1)) & (of_k.min(1) <= of_q.max(1))
  return jax.lax.cond(meet.any(), then, or_else)


def _queries(x: jax.Array, pairs: _Pairs) -> jax.Array:
  """Returns the halves of queries of the pairs as rows of one array, [pairs · B, T / 2, …]."""
  return jnp.concatenate([part_of(x, of_queries) for of_queries, _ in pairs])


def _keys(keys: _Keys, pairs: _Pairs) -> _Keys:
  """Returns the same of the halves of keys."""
  return jax.tree.map(lambda x: jnp.concatenate([part_of(x, i) for _, i in pairs]), keys)


def _apart(arrays: _T, count: int) -> list[_T]:
  """Returns the parts of arrays [count · B, …]."""
  parts = [jnp.split(x, count) for x in jax.tree.leaves(arrays)]
  tree = jax.tree.structure(arrays)
  return [jax.tree.unflatten(tree, of_one) for of_one in zip(*parts, strict=True)]
