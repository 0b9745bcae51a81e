"""The weights of pipeline stages: laid out once a step, and read layer by layer at each tick.

A stage reads its layers again for each microbatch. Two things are done here once a step:

- With several repeats, layers are sent to the stages that compute them, and their gradients back. A
  parameter is stored as RepeatedTransformer's [L, …], in which neighboring layers are neighbors.
- Weights that FSDP splits are gathered, and their gradients are scattered, both in the dtype of the
  computation. Before, a device adds up the gradients of its own rows over all ticks, in the dtype
  of the parameter.

XLA's partitioner can do neither: it sends the gradients of a loop at each turn. Therefore the
transfers are written by hand here, in both directions.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from paxlite.core.trees import PyTree
from paxlite.layers.layer_facts import LayerFacts
from paxlite.parallel import partitioning
from paxlite.parallel.partitioning import active_mesh, axes_of


class StageWeights:
  """The variables of a stack as the stages read them.

  Attributes:
    sums: Where gradients are added up: a tree of arrays that ticks pass on.
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
    self._weights = [w for w, _ in laid_out]
    self.sums = [sums for _, sums in laid_out]

  def layer(
    self, sums: list[jax.Array], layer_Z: jax.Array, works_Z: jax.Array
  ) -> tuple[PyTree, list[jax.Array]]:
    """Returns the variables of one layer of each stage, [Z, Q, …], and the sums to pass on."""
    found = [
      layout.layer(w, one, layer_Z, works_Z)
      for layout, w, one in zip(self._layouts, self._weights, sums, strict=True)
    ]
    return jax.tree.unflatten(self._tree, [w for w, _ in found]), [one for _, one in found]


@dataclasses.dataclass(frozen=True)
class StageLayout:
  """How the layers of one array [L, …] are distributed, before a step and in it.

  In a step, the array is [Z, n, …]: stage z has n = R · l layers, first those of its first group.
  Layer j of a stage in repeat r is layer (r · Z + z) · l + j of the stack.

  Attributes:
    stages: Z.
    repeats: R, the number of groups of layers in a stage.
    split: The mesh axes of each dimension of [L, …], before a step and after it.
    row_shards: The mesh axes whose devices each add up the gradients of their own rows. What is
      split over these axes is gathered.
    combine: Whether what the ticks return for an array is added, or its maximum is taken.
  """

  stages: int
  repeats: int
  split: PartitionSpec
  row_shards: tuple[str, ...]
  combine: Literal['add', 'max'] = 'add'

  def lay_out(self, w: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Returns the weights of a step, [Z, n, …], and the sums of their gradients.

    The sums are zeros [Z, Q, n, …]. They are there for their own gradient, which `layer` makes.
    The weights that are returned have no gradient.

    Args:
      w: The array [L, …].
      dtype: The dtype in which the layers read it.
    """
    n = w.shape[0] // self.stages
    sums_shape = self.stages, self._num_row_shards, n, *w.shape[1:]
    send = _on_devices(self._send, [self.split], self._step_spec)
    collect = _on_devices(self._collect, [self._sums_spec], self.split)

    def lay_out(w: jax.Array) -> tuple[jax.Array, jax.Array]:
      return send(w.astype(dtype)), jnp.zeros(sums_shape, w.dtype)

    def backward(_: None, grads: tuple[jax.Array, jax.Array]) -> tuple[jax.Array]:
      # sent in the dtype in which layers without stages send theirs
      return (collect(grads[1].astype(dtype)).astype(w.dtype),)

    with_gradient = jax.custom_vjp(lay_out)
    with_gradient.defvjp(lambda w: (lay_out(w), None), backward)
    laid_out, sums = with_gradient(w)
    return jax.lax.stop_gradient(laid_out), sums

  def layer(
    self, w_Zn: jax.Array, sums_ZQn: jax.Array, layer_Z: jax.Array, works_Z: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Returns the weights of one layer of each stage, [Z, Q, …], and the sums as they are.

    In the backward pass, the gradients of the layers are added to the gradient of the sums, in
    place.

    Args:
      w_Zn: The weights from `lay_out`.
      sums_ZQn: The sums from `lay_out`, or from an earlier call.
      layer_Z: The number of the layer, from 0 to n - 1.
      works_Z: Whether a stage computes a microbatch; gradients of others are left out.
    """
    per_stage = PartitionSpec('stage')
    layer_spec = PartitionSpec('stage', self.row_shards or None, *self._step_spec[2:])
    read = _on_devices(_read, [self._step_spec, per_stage], layer_spec)
    accumulate = _on_devices(
      functools.partial(_accumulate, self.combine),
      [self._sums_spec, layer_spec, per_stage, per_stage],
      self._sums_spec,
    )

    def layer(w: jax.Array, sums: jax.Array, *at: jax.Array) -> tuple[jax.Array, jax.Array]:
      return read(w, at[0]), sums

    def backward(
      at: tuple[jax.Array, ...], grads: tuple[jax.Array, jax.Array]
    ) -> tuple[None, jax.Array, None, None]:
      return None, accumulate(grads[1], grads[0], *at), None, None

    with_gradient = jax.custom_vjp(layer)
    with_gradient.defvjp(lambda w, sums, *at: (layer(w, sums, *at), at), backward)
    return with_gradient(w_Zn, sums_ZQn, layer_Z, works_Z)

  @property
  def _num_row_shards(self) -> int:
    active = active_mesh()
    return 1 if active is None else math.prod(active[0].shape[a] for a in self.row_shards)

  @property
  def _step_spec(self) -> PartitionSpec:
    """The mesh axes of the weights of a step, [Z, n, …]."""
    kept = (None if self._is_gathered(entry) else entry for entry in self.split[1:])
    return PartitionSpec('stage', None, *kept)

  @property
  def _sums_spec(self) -> PartitionSpec:
    """The mesh axes of the sums, [Z, Q, n, …]."""
    return PartitionSpec('stage', self.row_shards or None, *self._step_spec[1:])

  def _is_gathered(self, entry: str | tuple[str, ...] | None) -> bool:
    return bool(axes_of(entry)) and set(axes_of(entry)) <= set(self.row_shards)

  def _send(self, w: jax.Array) -> jax.Array:
    """One device's part of an array [L, …] as its part of [Z, n, …]."""
    w_Zn = self._to_stages(w)
    for dim, entry in enumerate(self.split):
      if self._is_gathered(entry):
        w_Zn = jax.lax.all_gather(w_Zn, axes_of(entry), axis=dim + 1, tiled=True)
    return w_Zn

  def _collect(self, sums_ZQn: jax.Array) -> jax.Array:
    """The reverse of _send, which adds up the sums of all rows."""
    sums_Zn, over = sums_ZQn[:, 0], set(self.row_shards)
    for dim, entry in enumerate(self.split):
      if self._is_gathered(entry):
        over -= set(axes_of(entry))
        sums_Zn = jax.lax.psum_scatter(
          sums_Zn, axes_of(entry), scatter_dimension=dim + 1, tiled=True
        )
    if over:
      total: Callable[..., jax.Array] = jax.lax.psum if self.combine == 'add' else jax.lax.pmax
      sums_Zn = total(sums_Zn, tuple(a for a in self.row_shards if a in over))
    return self._from_stages(sums_Zn)

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
  """One group of layers from each stage to another, or to itself.

  Attributes:
    taken: Which of its stored groups a stage sends, by stage.
    to: The stage that gets it.
    put: For which repeat a stage gets what it receives.
  """

  taken: list[int]
  to: list[int]
  put: list[int]


def _on_devices(
  function: Callable[..., jax.Array], in_specs: Sequence[PartitionSpec], out_specs: PartitionSpec
) -> Callable[..., jax.Array]:
  """`function` of the parts that a device has, or of whole arrays if there is no mesh."""
  active = active_mesh()
  if active is None:
    return function
  return jax.shard_map(
    function, mesh=active[0], in_specs=tuple(in_specs), out_specs=out_specs, check_vma=False
  )


def _read(w_Zn: jax.Array, layer_Z: jax.Array) -> jax.Array:
  """Layer `layer_Z` of each stage that is here, [Z, 1, …]."""
  index = jax.lax.dynamic_index_in_dim
  return jnp.stack([index(w_n, layer_Z[z]) for z, w_n in enumerate(w_Zn)])


def _accumulate(
  combine: str, sums_ZQn: jax.Array, grads_ZQ: jax.Array, layer_Z: jax.Array, works_Z: jax.Array
) -> jax.Array:
  """The sums with the gradients of layer `layer_Z` of each stage that is here."""
  for z in range(len(sums_ZQn)):
    at: tuple[jax.Array | int, ...] = z, 0, layer_Z[z], *(0 for _ in sums_ZQn.shape[3:])
    old = jax.lax.dynamic_slice(sums_ZQn, at, (1, 1, 1, *sums_ZQn.shape[3:]))
    grad = jnp.where(works_Z[z], grads_ZQ[z], 0).astype(old.dtype).reshape(old.shape)
    new = old + grad if combine == 'add' else jnp.maximum(old, grad)
    sums_ZQn = jax.lax.dynamic_update_slice(sums_ZQn, new, at)
  return sums_ZQn


def _split(w: jax.Array, axes: tuple[str | None, ...]) -> PartitionSpec:
  """The mesh axes of a variable [L, …] whose layers have these logical axes."""
  active = active_mesh()
  if active is None:
    return PartitionSpec(*(None for _ in w.shape))
  mesh, rules = active
  partition = partitioning.spec(('layers', *axes), rules)
  return partitioning.fitting(partition, w.shape, dict(mesh.shape))
