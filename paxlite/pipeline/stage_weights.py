"""The weights of pipeline stages: laid out once a step, and read layer by layer at each tick.

A stage reads its layers again for each microbatch. Two things are done here once a step:

- With several repeats, layers are sent to the stages that compute them, and their gradients back. A
  parameter is stored as RepeatedTransformer's [L, …], in which neighboring layers are neighbors.
- Weights that FSDP splits are gathered, and their gradients are scattered, both in the dtype of the
  computation. Before, a device adds up the gradients of its own rows over all ticks, in the dtype
  of the parameter.

XLA's partitioner can do neither: it sends the gradients of a loop at each turn. Therefore the
transfers are written by hand here, in both directions.

The gradient of a layer's weight goes to a slot, and from there to the sum. The sums are thus no
argument of the function that recomputes the layer: XLA would not let a product add to an argument
that it keeps behind an optimization barrier.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from paxlite.core.trees import PyTree
from paxlite.parallel import partitioning
from paxlite.parallel.partitioning import active_mesh, axes_of
from paxlite.pipeline.layer_facts import Combine, LayerFacts


class StageWeights:
  """The variables of a stack as the stages read them.

  Attributes:
    sums: Where gradients are added up: for each layer of a group, a list of arrays that ticks pass
      on.
  """

  def __init__(
    self,
    stack: Mapping[str, PyTree],
    facts: LayerFacts,
    stages: int,
    repeats: int,
    row_shards: tuple[str, ...],
  ):
    leaves, self._tree = jax.tree.flatten(stack)
    self._layouts = [
      StageLayout(stages, repeats, _split(w, axes), row_shards, combine)
      for w, axes, combine in zip(leaves, facts.axes, facts.combine, strict=True)
    ]
    laid_out = [
      layout.lay_out(w, dtype)
      for layout, w, dtype in zip(self._layouts, leaves, facts.dtypes, strict=True)
    ]
    by_layer = lambda of_leaves: [list(one) for one in zip(*of_leaves, strict=True)]
    self._weights = by_layer([w for w, _, _ in laid_out])
    self.sums = by_layer([sums for _, sums, _ in laid_out])
    self._is_trained = [is_trained for _, _, is_trained in laid_out]

  def in_turn(self, x: jax.Array, sums: list[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
    """Returns the arguments; XLA passes on their gradients when it has computed all of them.

    XLA would otherwise compute the gradients of several layers at a time, and hold the activations
    of all these layers. Sums of frozen weights are left out, because an argument of a function with
    a derivative of its own gets a gradient, needed or not.
    """
    x, trained = _in_turn(x, list(itertools.compress(sums, self._is_trained)))
    left = iter(trained)
    found = [next(left) if t else one for t, one in zip(self._is_trained, sums, strict=True)]
    return x, found

  def slots(
    self, sums: list[jax.Array], repeat_Z: jax.Array, works_Z: jax.Array
  ) -> tuple[list[jax.Array], list[jax.Array]]:
    """Returns where `layer` leaves the gradients of one layer, and its sums to pass on."""
    found = [
      layout.slot(one, repeat_Z, works_Z) for layout, one in zip(self._layouts, sums, strict=True)
    ]
    return [slot for slot, _ in found], [one for _, one in found]

  def layer(self, j: int, slots: list[jax.Array], repeat_Z: jax.Array) -> PyTree:
    """Returns the variables of layer j of a group of each stage, [Z, Q, …]."""
    found = [
      layout.layer(w, slot, repeat_Z)
      for layout, w, slot in zip(self._layouts, self._weights[j], slots, strict=True)
    ]
    return jax.tree.unflatten(self._tree, found)


@dataclasses.dataclass(frozen=True)
class StageLayout:
  """How the layers of one array [L, …] are distributed, before a step and in it.

  In a step there is one array for each layer of a group, [Z, R, …]: stage z has layer j of its
  groups there. Layer j of a stage in repeat r is layer (r · Z + z) · l + j of the stack. Separate
  arrays can be read without copying a layer out of a stack.
  """

  stages: int  # Z
  repeats: int  # R, the number of groups of layers in a stage
  split: PartitionSpec  # the mesh axes of each dimension of [L, …], before a step and after it
  # The mesh axes whose devices each add up the gradients of their own rows. What is split over
  # these axes is gathered.
  row_shards: tuple[str, ...]
  combine: Combine = 'add'  # how what the ticks return for an array is combined: see LayerFacts

  def lay_out(
    self, w: jax.Array, dtype: DTypeLike
  ) -> tuple[list[jax.Array], list[jax.Array], bool]:
    """Returns the weights of a step, l arrays [Z, R, …], and the sums of their gradients.

    The sums are zeros [Z, Q, R, …]. They are there for their own gradient, which `slot` adds up.
    The weights that are returned have no gradient. The third result says whether the array is
    trained, as far as this is known while it is traced.

    Args:
      w: The array [L, …].
      dtype: The dtype in which the layers read it.
    """
    l = w.shape[0] // (self.stages * self.repeats)
    sums_shape = self.stages, self._num_row_shards, self.repeats, *w.shape[1:]
    send = _on_devices(self._send, [self.split], [self._step_spec] * l)
    collect = _on_devices(self._collect, [self._sums_spec] * l, self.split)
    is_trained = False

    def lay_out(w: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
      return send(w.astype(dtype)), [jnp.zeros(sums_shape, w.dtype) for _ in range(l)]

    def forward(w: jax.Array) -> tuple[tuple[list[jax.Array], list[jax.Array]], None]:
      nonlocal is_trained
      is_trained = True  # JAX calls this function if w has a gradient
      return lay_out(w), None

    def backward(_: None, grads: tuple[list[jax.Array], list[jax.Array]]) -> tuple[jax.Array]:
      # sent in the dtype in which layers without stages send theirs
      return (collect(*(grad.astype(dtype) for grad in grads[1])).astype(w.dtype),)

    with_gradient = jax.custom_vjp(lay_out)
    with_gradient.defvjp(forward, backward)
    laid_out, sums = with_gradient(w)
    return jax.lax.stop_gradient(laid_out), sums, is_trained

  def layer(self, w_ZR: jax.Array, slot_ZQ: jax.Array, repeat_Z: jax.Array) -> jax.Array:
    """Returns the weights of one layer of each stage, [Z, Q, …], whose gradient goes to a slot.

    Args:
      w_ZR: The weights of the layer in all groups, from `lay_out`.
      slot_ZQ: From `slot`.
      repeat_Z: The number of the group, from 0 to R - 1.
    """
    read = _on_devices(_read, [self._step_spec, PartitionSpec('stage')], self._layer_spec)
    dtype = slot_ZQ.dtype

    def layer(w: jax.Array, slot: jax.Array, repeat: jax.Array) -> jax.Array:
      return read(w, repeat)

    with_gradient = jax.custom_vjp(layer)
    with_gradient.defvjp(
      lambda *arguments: (layer(*arguments), None), lambda _, grad: (None, grad.astype(dtype), None)
    )
    return with_gradient(w_ZR, slot_ZQ, repeat_Z)

  def slot(
    self, sums_ZQR: jax.Array, repeat_Z: jax.Array, works_Z: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Returns zeros [Z, Q, …], whose gradient is added to that of the sums, and the sums.

    The gradient is added in place.

    Args:
      sums_ZQR: The sums of a layer from `lay_out`, or from an earlier call.
      repeat_Z: The number of the group, from 0 to R - 1.
      works_Z: Whether a stage computes a microbatch; others have no load and no maximum.
    """
    per_stage = PartitionSpec('stage')
    accumulate = _on_devices(
      functools.partial(_accumulate, self.combine),
      [self._sums_spec, self._layer_spec, per_stage, per_stage],
      self._sums_spec,
    )

    def slot(sums: jax.Array, *at: jax.Array) -> tuple[jax.Array, jax.Array]:
      return jnp.zeros((*sums.shape[:2], *sums.shape[3:]), sums.dtype), sums

    def backward(
      at: tuple[jax.Array, ...], grads: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, None, None]:
      return accumulate(grads[1], grads[0], *at), None, None

    with_gradient = jax.custom_vjp(slot)
    with_gradient.defvjp(lambda sums, *at: (slot(sums, *at), at), backward)
    return with_gradient(sums_ZQR, repeat_Z, works_Z)

  @property
  def _num_row_shards(self) -> int:
    active = active_mesh()
    return 1 if active is None else math.prod(active[0].shape[a] for a in self.row_shards)

  @property
  def _step_spec(self) -> PartitionSpec:
    """The mesh axes of the weights of a step, [Z, R, …]."""
    kept = (None if self._is_gathered(entry) else entry for entry in self.split[1:])
    return PartitionSpec('stage', None, *kept)

  @property
  def _sums_spec(self) -> PartitionSpec:
    """The mesh axes of the sums, [Z, Q, R, …]."""
    return PartitionSpec('stage', self.row_shards or None, *self._step_spec[1:])

  @property
  def _layer_spec(self) -> PartitionSpec:
    """The mesh axes of the weights of a layer, [Z, Q, …]."""
    return PartitionSpec('stage', self.row_shards or None, *self._step_spec[2:])

  def _is_gathered(self, entry: str | tuple[str, ...] | None) -> bool:
    return bool(axes_of(entry)) and set(axes_of(entry)) <= set(self.row_shards)

  def _send(self, w: jax.Array) -> list[jax.Array]:
    """One device's part of an array [L, …] as its parts of l arrays [Z, R, …]."""
    w_Zn = self._to_stages(w)
    w_ZRl = w_Zn.reshape(len(w_Zn), self.repeats, -1, *w_Zn.shape[2:])
    sent = []
    for j in range(w_ZRl.shape[2]):
      w_ZR = w_ZRl[:, :, j]
      for dim, entry in enumerate(self.split):
        if self._is_gathered(entry):
          w_ZR = jax.lax.all_gather(w_ZR, axes_of(entry), axis=dim + 1, tiled=True)
      sent.append(w_ZR)
    return sent

  def _collect(self, *sums_ZQR: jax.Array) -> jax.Array:
    """The reverse of _send, which adds up the sums of all rows."""
    w_ZRl = jnp.stack([self._total(sums[:, 0]) for sums in sums_ZQR], axis=2)
    return self._from_stages(w_ZRl.reshape(len(w_ZRl), -1, *w_ZRl.shape[3:]))

  def _total(self, sums_ZR: jax.Array) -> jax.Array:
    """The sums of one layer over the devices of `row_shards`, split as the weight is stored."""
    over = set(self.row_shards)
    for dim, entry in enumerate(self.split):
      if self._is_gathered(entry):
        over -= set(axes_of(entry))
        sums_ZR = jax.lax.psum_scatter(
          sums_ZR, axes_of(entry), scatter_dimension=dim + 1, tiled=True
        )
    if over:
      total: Callable[..., jax.Array] = jax.lax.pmax if self.combine == 'max' else jax.lax.psum
      sums_ZR = total(sums_ZR, tuple(a for a in self.row_shards if a in over))
    return sums_ZR

  def _to_stages(self, w: jax.Array) -> jax.Array:
    """Returns [L, …] as [Z, n, …]; on a mesh, both are the part of one stage."""
    if active_mesh() is None:
      groups = w.reshape(self.repeats, self.stages, -1, *w.shape[1:]).swapaxes(0, 1)
      return groups.reshape(self.stages, -1, *w.shape[1:])
    if self.repeats == 1:
      return w[None]
    sent = w.reshape(self.repeats, -1, *w.shape[1:])
    received = jnp.zeros_like(sent)
    stage = jax.lax.axis_index('stage')
    for turn in self.turns():
      group = jax.lax.dynamic_index_in_dim(sent, jnp.array(turn.taken)[stage])
      group = jax.lax.ppermute(group, 'stage', list(enumerate(turn.to)))
      into = jnp.array(turn.put)[stage]
      received = jax.lax.dynamic_update_index_in_dim(received, group, into, 0)
    return received.reshape(1, *w.shape)

  def _from_stages(self, w_Zn: jax.Array) -> jax.Array:
    """The reverse of _to_stages."""
    if active_mesh() is None:
      groups = w_Zn.reshape(self.stages, self.repeats, -1, *w_Zn.shape[2:]).swapaxes(0, 1)
      return groups.reshape(-1, *w_Zn.shape[2:])
    if self.repeats == 1:
      return w_Zn[0]
    sent = w_Zn.reshape(self.repeats, -1, *w_Zn.shape[2:])
    received = jnp.zeros_like(sent)
    stage = jax.lax.axis_index('stage')
    for turn in self.turns():
      group = jax.lax.dynamic_index_in_dim(sent, jnp.array(turn.put)[stage])
      group = jax.lax.ppermute(group, 'stage', [(b, a) for a, b in enumerate(turn.to)])
      into = jnp.array(turn.taken)[stage]
      received = jax.lax.dynamic_update_index_in_dim(received, group, into, 0)
    return received.reshape(w_Zn.shape[1:])

  def turns(self) -> list['Turn']:
    """In which turns the groups of layers are sent; in each, a stage sends and receives one.

    Stored are the groups s · R … on stage s. Group g is for stage g mod Z. Stages whose numbers
    are the same modulo Z / gcd(R, Z) have groups for the same stages, so that they take turns.
    """
    Z, R = self.stages, self.repeats
    turns = []
    for turn in range(R):
      taken = [(turn + s // (Z // math.gcd(R, Z))) % R for s in range(Z)]
      groups = [s * R + k for s, k in enumerate(taken)]
      to = [g % Z for g in groups]
      put = [groups[to.index(z)] // Z for z in range(Z)]
      turns.append(Turn(taken, to, put))
    return turns


@dataclasses.dataclass(frozen=True)
class Turn:
  """One group of layers from each stage to another, or to itself."""

  taken: list[int]  # which of its stored groups a stage sends, by stage
  to: list[int]  # the stage that gets it
  put: list[int]  # for which repeat a stage gets what it receives


@jax.custom_vjp
def _in_turn(x: jax.Array, sums: list[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
  return x, sums


_in_turn.defvjp(
  lambda x, sums: ((x, sums), None), lambda _, grads: jax.lax.optimization_barrier(grads)
)


def _on_devices(
  function: Callable[..., PyTree],
  in_specs: Sequence[PartitionSpec],
  out_specs: PartitionSpec | list[PartitionSpec],
) -> Callable[..., PyTree]:
  """`function` of the parts that a device has, or of whole arrays if there is no mesh."""
  active = active_mesh()
  if active is None:
    return function
  return jax.shard_map(
    function, mesh=active[0], in_specs=tuple(in_specs), out_specs=out_specs, check_vma=False
  )


def _read(w_ZR: jax.Array, repeat_Z: jax.Array) -> jax.Array:
  """The weights of group `repeat_Z` of each stage that is here, [Z, 1, …]."""
  if w_ZR.shape[1] == 1:  # without a copy
    return w_ZR
  index = jax.lax.dynamic_index_in_dim
  return jnp.stack([index(w_R, repeat_Z[z]) for z, w_R in enumerate(w_ZR)])


def _accumulate(
  combine: Combine,
  sums_ZQR: jax.Array,
  grads_ZQ: jax.Array,
  repeat_Z: jax.Array,
  works_Z: jax.Array,
) -> jax.Array:
  """The sums with the gradients of group `repeat_Z` of each stage that is here."""
  new_ZQR = []
  for z, sums_QR in enumerate(sums_ZQR):
    grad = grads_ZQ[z, 0].astype(sums_QR.dtype)
    if combine != 'add':
      grad = jnp.where(works_Z[z], grad, 0)
    # An idle stage computes with numbers of which every derivative is finite. Its result is not
    # used, so that its gradients are zero.
    add = jnp.maximum if combine == 'max' else jnp.add
    if sums_QR.shape[1] == 1:  # XLA lets a product add to this sum
      new_ZQR.append(add(sums_QR[0, 0], grad)[None, None])
      continue
    at: tuple[jax.Array | int, ...] = 0, repeat_Z[z], *(0 for _ in grad.shape)
    old = jax.lax.dynamic_slice(sums_QR, at, (1, 1, *grad.shape))
    new_ZQR.append(jax.lax.dynamic_update_slice(sums_QR, add(old, grad), at))
  return jnp.stack(new_ZQR)


def _split(w: jax.Array, axes: tuple[str | None, ...]) -> PartitionSpec:
  """The mesh axes of a variable [L, …] whose layers have these logical axes."""
  active = active_mesh()
  if active is None:
    return PartitionSpec(*(None for _ in w.shape))
  mesh, rules = active
  partition = partitioning.spec(('layers', *axes), rules)
  return partitioning.fitting(partition, w.shape, dict(mesh.shape))
