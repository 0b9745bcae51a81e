"""The dispatch without a capacity: every token has a slot with each of its experts.

A choice is a token with one of its experts; R = J·M·X is their number on a device. Choices are
sorted by expert. If experts are sharded over devices, each choice then travels to the device of its
expert and back, by an all-to-all. On its device, an expert's slots follow each other.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from paxlite.layers.moe.grouped_matmul import alignment, grouped_matmul
from paxlite.layers.moe.moe import Experts, Routing, Weights
from paxlite.layers.precision.scattered_gradient import gathered
from paxlite.parallel import partitioning, torus

_Number = TypeVar('_Number', jax.Array, int)


class Permutation(NamedTuple):
  """Where rows go, as gathers in both directions; an index beyond the rows means none."""

  slot_R: jax.Array  # int32: the slot of each choice
  choice_P: jax.Array  # int32: the choice of each slot
  expert_P: jax.Array  # int32: the expert of each slot


class Slices(NamedTuple):
  """The slices that a device sends and receives, for each expert of each device.

  The first half of the arguments of jax.lax.ragged_all_to_all says which rows are sent, the second
  half where they are put on the device that gets them, and how many rows this device gets.
  """

  from_E: jax.Array
  sent_E: jax.Array
  to_E: jax.Array
  received_E: jax.Array


class Way(NamedTuple):
  """How rows travel between devices, and how they travel back."""

  there: Slices
  back: Slices


@dataclasses.dataclass(frozen=True)
class DroplessDispatch:
  """A dispatch that gives every token a slot with each of its experts.

  Only slots that are taken are multiplied. If experts are sharded, a device has room for all
  choices of all devices that share them, because all may choose its experts. This room costs memory
  and time, which `room` limits.
  """

  # if experts are sharded, a device has room for this many times its own number of choices, the
  # mean; choices for which there is no room get no output. 0 means room for all
  room: float = 0.0

  def __call__(
    self, x_JMD: jax.Array, routing: Routing, experts: Experts
  ) -> tuple[jax.Array, jax.Array]:
    """Returns Σ weight · expert(x) [J, M, D], and which choices had a slot [J, M, X]."""
    tokens_JMX = jnp.broadcast_to(routing.is_token_JM[..., None], routing.experts_JMX.shape)
    arguments = x_JMD, routing.experts_JMX, routing.weights_JMX, experts.weights
    active = partitioning.active_mesh()
    if active is None or active[0].size == 1:
      return _local(*arguments, activation=experts.activation, first=0), tokens_JMX
    mesh, rules = active
    fitted = lambda names, shape: partitioning.fitting(
      partitioning.spec(names, rules), shape, dict(mesh.shape)
    )
    tokens = fitted(('batch', None, None), x_JMD.shape)
    over, hidden, embed = fitted(
      ('experts', 'mlp', 'expert_embed'), experts.weights.w_out_EFD.shape
    )
    # FSDP splits weights over this axis; experts, if their tokens do not leave their devices
    is_fsdp = over in partitioning.axes_of(rules['expert_groups'])
    split, owners = (over, None) if is_fsdp else (embed, over)
    body: Callable[..., tuple[jax.Array, jax.Array]] = functools.partial(
      _sharded, activation=experts.activation, expert_axis=owners,
      tokens_differ=owners in partitioning.axes_of(tokens[0]), hidden_axis=hidden, room=self.room,
    )  # fmt: skip
    # a spec for all arrays of a field: w_in_EDF, w_out_EFD, b_in_EF, b_out_ED
    dims = (over, embed, hidden), (over, hidden, embed), (over, hidden), (over, embed)
    if split is not None:
      split_dims = [names.index(split) if split in names else None for names in dims]
      body = _gathering(body, split, split_dims, torus.lines(mesh, split))
    weights = Weights(*(PartitionSpec(*names) for names in dims))  # type: ignore[arg-type]
    sharded = jax.shard_map(
      body, mesh=mesh, in_specs=(tokens, tokens, tokens, weights), out_specs=(tokens, tokens),
      check_vma=False,
    )  # fmt: skip
    y_JMD, kept_JMX = sharded(*arguments)
    return y_JMD, kept_JMX & tokens_JMX


def _gathering(
  body: Callable[..., tuple[jax.Array, jax.Array]],
  axis: str,
  dims: Sequence[int | None],
  lines: tuple[int, ...],
) -> Callable[..., tuple[jax.Array, jax.Array]]:
  """Returns `body` for weights that are split over a mesh axis.

  Whole weights are not kept for the backward pass, which gathers them again.

  Args:
    body: A function of whole weights.
    axis: The name of the mesh axis.
    dims: The dimension that is split, for each field of Weights; None: the field is whole.
    lines: The lines of the torus along the axis; see scattered_gradient.gathered.
  """

  def of_parts(
    x_JMD: jax.Array, experts_JMX: jax.Array, weights_JMX: jax.Array, weights: Weights
  ) -> tuple[jax.Array, jax.Array]:
    whole = lambda part, dim: part if dim is None else gathered(part, axis, dim, lines)
    fields = (
      jax.tree.map(functools.partial(whole, dim=dim), field)
      for field, dim in zip(weights, dims, strict=True)
    )
    return body(x_JMD, experts_JMX, weights_JMX, Weights(*fields))

  is_kept = lambda primitive, *_, **__: primitive.name != 'all_gather'
  return jax.checkpoint(of_parts, policy=is_kept, prevent_cse=False)


def _sharded(
  x_JMD: jax.Array,
  experts_JMX: jax.Array,
  weights_JMX: jax.Array,
  weights: Weights,
  activation: Callable[..., jax.Array],
  expert_axis: str | None,
  tokens_differ: bool,
  hidden_axis: str | None,
  room: float,
) -> tuple[jax.Array, jax.Array]:
  """Computes one device's part, which holds some groups, some experts, and part of F.

  Args:
    x_JMD: The tokens of this device.
    experts_JMX: Their experts, numbered from 0 over the experts of all devices.
    weights_JMX: The weights of these experts, float32.
    weights: The weights of this device's experts, for its part of F.
    activation: The activation function.
    expert_axis: The mesh axis over which experts are sharded, or None.
    tokens_differ: Whether tokens are sharded over expert_axis too.
    hidden_axis: The mesh axis over which F is sharded, or None.
    room: See DroplessDispatch.
  """
  kept_JMX = jnp.ones(experts_JMX.shape, bool)
  if hidden_axis is not None:  # the devices' outputs are summed
    is_first = jax.lax.axis_index(hidden_axis) == 0
    weights = weights._replace(b_out_ED=tuple(b_ED * is_first for b_ED in weights.b_out_ED))
  arguments = x_JMD, experts_JMX, weights_JMX, weights, activation
  if tokens_differ and expert_axis is not None:
    y_JMD, kept_JMX = _exchanged(*arguments, axis=expert_axis, room=room)
  elif expert_axis is not None:
    first = jax.lax.axis_index(expert_axis) * weights.w_out_EFD.shape[0]
    y_JMD = jax.lax.psum(_local(*arguments, first=first), expert_axis)
  else:
    y_JMD = _local(*arguments, first=0)
  return y_JMD if hidden_axis is None else jax.lax.psum(y_JMD, hidden_axis), kept_JMX


def _local(
  x_JMD: jax.Array,
  experts_JMX: jax.Array,
  weights_JMX: jax.Array,
  weights: Weights,
  activation: Callable[..., jax.Array],
  first: jax.Array | int,
) -> jax.Array:
  """Returns Σ weight · expert(x) over the experts from `first` on, which this device holds."""
  J, M, D = x_JMD.shape
  E, X = len(weights.w_out_EFD), experts_JMX.shape[-1]
  rows = alignment(weights.w_in_EDF[0], experts_JMX.size)
  choice_R, counts_E = _sorted(experts_JMX.reshape(-1) - first, E)
  sizes_E = _multiple(counts_E, rows)
  R = choice_R.shape[0]
  permutation = _permutation(
    choice_R, counts_E, sizes_E, num_slots=_multiple(R + E * (rows - 1), rows)
  )
  x_PD = permuted(x_JMD.reshape(J * M, D), permutation, X)
  # Hidden units are multiplied by the weights of their tokens: they are narrower than the outputs,
  # and no gradient needs the outputs, which are not computed again. Slots of no choice get 0, so
  # that they add nothing to the gradients of the experts, and their hidden units 0: an expert may
  # overflow for a token that did not choose it, and infinity · 0 is not a number.
  scale_P1 = permuted(weights_JMX.reshape(R, 1), permutation, 1)
  is_taken_P1 = permutation.choice_P[:, None] < R
  scale_P1 = jnp.where(is_taken_P1, scale_P1, 0)
  of_taken = lambda *hidden: activation(*(jnp.where(is_taken_P1, h, 0) for h in hidden))
  y_PD = _product(x_PD, weights, sizes_E, of_taken, R, scale_P1)
  return summed(y_PD, permutation, X).reshape(J, M, D)


def _exchanged(
  x_JMD: jax.Array,
  experts_JMX: jax.Array,
  weights_JMX: jax.Array,
  weights: Weights,
  activation: Callable[..., jax.Array],
  axis: str,
  room: float,
) -> tuple[jax.Array, jax.Array]:
  """Returns Σ weight · expert(x) over the experts of all devices of the mesh axis `axis`.

  It also returns which choices had a slot.
  """
  J, M, D = x_JMD.shape
  E, X = len(weights.w_out_EFD), experts_JMX.shape[-1]
  rows = alignment(weights.w_in_EDF[0], experts_JMX.size)
  devices = jax.lax.axis_size(axis)
  choice_R, counts_E = _sorted(experts_JMX.reshape(-1), devices * E)
  R = choice_R.shape[0]
  P = _multiple(math.ceil(min(room or devices, devices) * R) + E * (rows - 1), rows)
  (there, back), sizes_E = _exchange(counts_E, axis, rows, P)
  permutation = _permutation(choice_R, counts_E, counts_E, num_slots=R)
  x_RD = permuted(x_JMD.reshape(J * M, D), permutation, X)
  x_PD = exchanged(x_RD, Way(there, back), P, R, axis)
  y_PD = _product(x_PD, weights, sizes_E, activation, R, jnp.ones(()))
  y_RD = exchanged(y_PD, Way(back, there), R, P, axis)
  scale_R1 = permuted(weights_JMX.reshape(R, 1), permutation, 1)
  y_JMD = summed(_scaled(y_RD, scale_R1), permutation, X).reshape(J, M, D)
  is_sent_P = jnp.arange(R) < (there.from_E + there.sent_E)[permutation.expert_P]
  return y_JMD, is_sent_P[permutation.slot_R].reshape(J, M, X)


def _product(
  x_PD: jax.Array,
  weights: Weights,
  sizes_E: jax.Array,
  activation: Callable[..., jax.Array],
  num_choices: int,
  scale_P1: jax.Array,
) -> jax.Array:
  """Returns scale · (w_out·activation(w_in·x + b_in …) + b_out) of each slot.

  num_choices is the mean over the devices.
  """
  # tells paxlite.aot how many of the rows are multiplied if the devices have equal loads
  scope = functools.partial(jax.named_scope, f'rows_{num_choices}_of_{x_PD.shape[0]}')
  product = lambda x, w: grouped_matmul(x, w, sizes_E, num_choices)
  with scope():
    hidden = [product(x_PD, w_EDF) for w_EDF in weights.w_in_EDF]
  if not weights.b_in_EF:
    hidden_PF = _scaled(activation(*hidden), scale_P1)
    with scope():
      return product(hidden_PF, weights.w_out_EFD)
  stop_E = jnp.cumsum(sizes_E)
  expert_P = jnp.searchsorted(stop_E, jnp.arange(len(x_PD)), side='right', method='compare_all')
  biases = [b_EF.at[expert_P].get(mode='clip') for b_EF in weights.b_in_EF]
  hidden_PF = activation(*(h + b for h, b in zip(hidden, biases, strict=True)))
  hidden_PF = _scaled(hidden_PF, scale_P1)
  with scope():
    out_PD = product(hidden_PF, weights.w_out_EFD)
  return out_PD + _scaled(weights.b_out_ED[0].at[expert_P].get(mode='clip'), scale_P1)


def _scaled(x: jax.Array, scale: jax.Array) -> jax.Array:
  """Returns x · scale, whose gradients are summed in float32 too."""
  return (x.astype(jnp.float32) * scale).astype(x.dtype)


def _multiple(number: _Number, of: int) -> _Number:
  return -(-number // of) * of


def _sorted(expert_R: jax.Array, E: int) -> tuple[jax.Array, jax.Array]:
  """Returns the choices sorted by expert, and how many each of the experts 0 … E − 1 has.

  Choices of other experts come last. Choices of one expert keep their order.
  """
  key_R = jnp.where((expert_R >= 0) & (expert_R < E), expert_R, E)
  sorted_R, choice_R = jax.lax.sort_key_val(key_R, jnp.arange(key_R.size, dtype=jnp.int32))
  bounds = jnp.searchsorted(sorted_R, jnp.arange(E + 1), method='compare_all').astype(jnp.int32)
  return choice_R, jnp.diff(bounds)


def _permutation(
  choice_R: jax.Array, counts_E: jax.Array, sizes_E: jax.Array, num_slots: int
) -> Permutation:
  """Returns the slots of sorted choices; each expert has `sizes_E` of them."""
  R = choice_R.shape[0]
  stop_E = jnp.cumsum(sizes_E)
  slot_P = jnp.arange(num_slots, dtype=jnp.int32)
  expert_P = jnp.searchsorted(stop_E, slot_P, side='right', method='compare_all')
  within_P = slot_P - (stop_E - sizes_E).at[expert_P].get(mode='fill', fill_value=0)
  is_taken_P = within_P < counts_E.at[expert_P].get(mode='fill', fill_value=0)
  sorted_P = within_P + (jnp.cumsum(counts_E) - counts_E).at[expert_P].get(mode='clip')
  choice_P = jnp.where(is_taken_P, choice_R.at[sorted_P].get(mode='clip'), R)
  slot_R = jnp.full(R, num_slots, jnp.int32).at[choice_P].set(slot_P, mode='drop')
  return Permutation(slot_R, choice_P, expert_P)


def _exchange(counts_E: jax.Array, axis: str, rows: int, num_slots: int) -> tuple[Way, jax.Array]:
  """Returns the way of choices to the slots of their experts, and the slots of each expert.

  Args:
    counts_E: The number of this device's choices for each expert of all devices.
    axis: The mesh axis of the devices.
    rows: The number of slots of an expert is a multiple of it.
    num_slots: The number of slots of a device. Choices beyond it stay where they are.
  """
  devices, me = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
  counts_SE = jax.lax.all_gather(counts_E, axis)  # of each source S of choices
  sorted_SE = jnp.cumsum(counts_SE, axis=1) - counts_SE
  sizes_SE = _multiple(counts_SE.sum(0), rows).reshape(devices, -1)
  start_E = (jnp.cumsum(sizes_SE, axis=1) - sizes_SE).reshape(-1)
  slot_SE = start_E + jnp.cumsum(counts_SE, axis=0) - counts_SE
  mine = lambda x_SE: x_SE.reshape(devices, devices, -1)[:, me].reshape(-1)
  sent_SE = jnp.clip(num_slots - slot_SE, 0, counts_SE)
  slot_SE = jnp.minimum(slot_SE, num_slots)
  there = Slices(sorted_SE[me], sent_SE[me], slot_SE[me], mine(sent_SE))
  back = Slices(mine(slot_SE), mine(sent_SE), mine(sorted_SE), sent_SE[me])
  starts_E = start_E.reshape(devices, -1)[me]
  return Way(there, back), jnp.clip(num_slots - starts_E, 0, sizes_SE[me])


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def permuted(x_MD: jax.Array, permutation: Permutation, X: int) -> jax.Array:
  """Puts each token in the slots of its X choices, [P, D]; other slots get any token.

  Its gradient is `summed`. JAX's derivative of a gather would be a scatter with atomics.
  """
  # zeros for the other slots would be a further pass over all rows, because no kernel of a product
  # takes them up
  return x_MD.at[permutation.choice_P // X].get(mode='clip')


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def summed(y_PD: jax.Array, permutation: Permutation, X: int) -> jax.Array:
  """Adds up the slots of each token's X choices in float32, [M, D]; its gradient is `permuted`.

  Choices without a slot get 0.
  """
  # the choices are the first dimension, so that no array has rows of X
  slots_XM = permutation.slot_R.reshape(-1, X).T
  y_XMD = y_PD.at[slots_XM].get(mode='fill', fill_value=0)
  return y_XMD.astype(jnp.float32).sum(0).astype(y_PD.dtype)


permuted.defvjp(
  lambda x_MD, permutation, X: (permuted(x_MD, permutation, X), permutation),
  lambda X, permutation, dy_PD: (summed(dy_PD, permutation, X), None),
)
summed.defvjp(
  lambda y_PD, permutation, X: (summed(y_PD, permutation, X), permutation),
  lambda X, permutation, dy_MD: (permuted(dy_MD, permutation, X), None),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def exchanged(x_RD: jax.Array, way: Way, num_rows: int, num_back: int, axis: str) -> jax.Array:
  """Sends rows to other devices, [num_rows, D]; rows that nobody sends are 0.

  Args:
    x_RD: The rows of this device.
    way: The way of the rows; their gradients travel back.
    num_rows: The number of rows of the result.
    num_back: R.
    axis: The mesh axis of the devices.
  """
  return _ragged_all_to_all(x_RD, way.there, num_rows, axis)


exchanged.defvjp(
  lambda x_RD, way, *numbers: (exchanged(x_RD, way, *numbers), way),
  lambda rows, back, axis, way, dy_PD: (_ragged_all_to_all(dy_PD, way.back, back, axis), None),
)


def _ragged_all_to_all(x_RD: jax.Array, slices: Slices, num_rows: int, axis: str) -> jax.Array:
  output_PD = jnp.zeros((num_rows, x_RD.shape[1]), x_RD.dtype)
  if partitioning.active_platform() != 'cpu':
    return jax.lax.ragged_all_to_all(x_RD, output_PD, *slices, axis_name=axis)
  # XLA has no ragged all-to-all on CPU. Each device sends each other as many rows as it may need.
  devices, most = jax.lax.axis_size(axis), min(x_RD.shape[0], num_rows)
  row_RE = jnp.arange(x_RD.shape[0])[:, None] - slices.from_E
  is_in_RE = (row_RE >= 0) & (row_RE < slices.sent_E)
  to_R = jnp.where(is_in_RE, row_RE + slices.to_E, 0).sum(1)
  device_R = is_in_RE.argmax(1) // (slices.from_E.shape[0] // devices)
  is_to_RS = is_in_RE.any(1, keepdims=True) & (device_R[:, None] == jnp.arange(devices))
  rank_R = (jnp.where(is_to_RS, jnp.cumsum(is_to_RS, axis=0), 0)).sum(1) - 1
  at_R = jnp.where(rank_R < 0, devices * most, device_R * most + rank_R)
  send = lambda rows, x: jax.lax.all_to_all(
    rows.at[at_R].set(x, mode='drop'), axis, 0, 0, tiled=True
  )
  rows = send(jnp.zeros((devices * most, x_RD.shape[1]), x_RD.dtype), x_RD)
  return output_PD.at[send(jnp.full(devices * most, num_rows), to_R)].set(rows, mode='drop')
