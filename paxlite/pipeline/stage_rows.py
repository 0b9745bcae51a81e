"""How the rows of a batch come to the first stage of a pipeline, and leave the last one."""

import contextlib
import math
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from paxlite.parallel.partitioning import activate, active_mesh, axes_of, fitting, shard, spec
from paxlite.pipeline.pipeline_schedule import PipelineSchedule


class StageRows:
  """The rows that each stage owns, and their way from stage to stage.

  Embeddings and logits are computed by all stages, each with its own rows. Rows travel towards
  stage 0, by one stage at each tick, while the stages compute. A microbatch is at stage 0 when it
  enters the first layer: each stage that it passes adds its own rows. After the last layer, it
  travels from the last stage, and each stage that it passes keeps its own rows. Gradients travel
  the other way.

  A microbatch takes every I-th row, so that rows stay on their devices.

  Shape letters: Z stages, I microbatches of b rows, which are split into Q parts; k rows that a
  stage owns of each Q-th of the batch.

  Attributes:
    schedule: The schedule of the pipeline.
    shape: The shape of the batch, (B, T, D).
    parts: Q.
  """

  def __init__(self, schedule: PipelineSchedule, shape: tuple[int, int, int], parts: int):
    """Takes the active mesh and rules, because derivatives are traced where others are active."""
    self.schedule, self.shape, self.parts = schedule, shape, parts
    self._active = active_mesh()

  def split(self, x: jax.Array) -> jax.Array:
    """[B, …] as [I, Q, b, …]."""
    I = self.schedule.microbatches
    split = x.reshape(-1, I, *x.shape[1:]).swapaxes(0, 1)
    return split.reshape(I, self.parts, -1, *x.shape[1:])

  def start(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the rows of each stage, [Z, Q, k, T, D], and what is at each stage at tick 0.

    Args:
      x_BTD: The rows before the first layer.
    """
    own, whole = self._moves()
    own_ZQkTD, entering_ZQbTD = _linear(own, whole)(x_BTD), self.filler(x_BTD.dtype)
    for tick in range(-self._earlier, 1):
      own_ZQkTD, entering_ZQbTD = self.enter(own_ZQkTD, entering_ZQbTD, jnp.array(tick))
    return own_ZQkTD, entering_ZQbTD

  def enter(
    self, own_ZQkTD: jax.Array, entering_ZQbTD: jax.Array, tick: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Returns the rows of each stage, and what is at each stage at a tick, as `start` for tick 0.

    Args:
      own_ZQkTD: The rows of each stage, which are passed on for their gradient alone.
      entering_ZQbTD: What was on its way to stage 0 at the tick before, by stage.
    """
    microbatch_Z = tick + jnp.arange(self.schedule.stages)
    return self._load(own_ZQkTD, self.send(entering_ZQbTD, -1), microbatch_Z)

  def leave(self, own_ZQkTD: jax.Array, leaving_ZQbTD: jax.Array, tick: jax.Array) -> jax.Array:
    """Returns the rows that each stage has after the last layer, [Z, Q, k, T, D].

    Args:
      own_ZQkTD: Those that it had before.
      leaving_ZQbTD: What comes from the last layer, or is on its way from it, by stage.
    """
    s = self.schedule
    microbatch_Z = tick - (s.ticks - s.microbatches) - jnp.arange(s.stages)[::-1]
    return self._keep(own_ZQkTD, leaving_ZQbTD, microbatch_Z)

  def finish(self, own_ZQkTD: jax.Array, leaving_ZQbTD: jax.Array) -> jax.Array:
    """Returns the rows after the last layer, [B, T, D], when all ticks are done."""
    for tick in range(self.schedule.ticks, self.schedule.ticks + self._later):
      leaving_ZQbTD = self.send(leaving_ZQbTD, -1)
      own_ZQkTD = self.leave(own_ZQkTD, leaving_ZQbTD, jnp.array(tick))
    own, whole = self._moves()
    return _linear(whole, own)(own_ZQkTD)

  def send(self, x_ZQbTD: jax.Array, by: int) -> jax.Array:
    """Returns what each stage receives from the stage `by` places before it."""

    def roll(by: int) -> Callable[[jax.Array], jax.Array]:
      return lambda x: self.on_stages(jnp.roll(self.on_stages(x), by, axis=0))

    # JAX's own derivative is a sum of two arrays, and XLA sends both
    return _linear(roll(by), roll(-by))(x_ZQbTD)

  def filler(self, dtype: DTypeLike) -> jax.Array:
    """Returns what idle stages compute with, [Z, Q, b, T, D].

    Its entries differ, so that norms have finite derivatives, also with an epsilon of 0.
    """
    b = self.shape[0] // (self.schedule.microbatches * self.parts)
    shape = self.schedule.stages, self.parts, b, *self.shape[1:]
    return self.on_stages(jnp.broadcast_to(jnp.cos(jnp.arange(shape[-1])).astype(dtype), shape))

  def on_stages(self, x_ZQbTD: jax.Array) -> jax.Array:
    """Constrains an array to the devices of its stages."""
    with contextlib.nullcontext() if self._active is None else activate(*self._active):
      return shard(x_ZQbTD, 'layers', 'row_shards', 'batch', 'residual_length', 'act_embed')

  @property
  def _earlier(self) -> int:
    """The number of ticks before tick 0 in which rows travel."""
    I = self.schedule.microbatches
    return max(r // self._rows_of_stage - r % I for r in range(self._rows))

  @property
  def _later(self) -> int:
    """The number of ticks after the last one in which rows travel."""
    Z, I = self.schedule.stages, self.schedule.microbatches
    return max((Z - 1 - r // self._rows_of_stage) - (I - 1 - r % I) for r in range(self._rows))

  def _load(
    self, own_ZQkTD: jax.Array, passing_ZQbTD: jax.Array, microbatch_Z: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Adds the rows of each stage to the microbatch that passes it.

    Each row is added to one microbatch, so that its gradient is stored in its place.

    Returns:
      The rows of each stage as they are, which passes their gradient on; and the microbatches.
    """

    def load(own: jax.Array, passing: jax.Array, at: jax.Array) -> tuple[jax.Array, jax.Array]:
      return own, self._copy(_loaded, own, passing, at)

    def backward(
      at: jax.Array, grads: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, None]:
      own, passing = grads
      rest = self._copy(_loaded, jnp.zeros_like(own), passing, at)
      return self._copy(_stored, own, passing, at), rest, None

    with_gradient = jax.custom_vjp(load)
    with_gradient.defvjp(lambda own, passing, at: (load(own, passing, at), at), backward)
    return with_gradient(own_ZQkTD, passing_ZQbTD, microbatch_Z)

  def _keep(
    self, own_ZQkTD: jax.Array, passing_ZQbTD: jax.Array, microbatch_Z: jax.Array
  ) -> jax.Array:
    """Stores the rows of each stage that are in the microbatch that passes it.

    Each row is stored once, so that what was in its place has no gradient.
    """

    def keep(own: jax.Array, passing: jax.Array, at: jax.Array) -> jax.Array:
      return self._copy(_stored, own, passing, at)

    def backward(at: jax.Array, own: jax.Array) -> tuple[jax.Array, jax.Array, None]:
      nothing = jnp.zeros_like(passing_ZQbTD)
      return own, self._copy(_loaded, own, nothing, at), None

    with_gradient = jax.custom_vjp(keep)
    with_gradient.defvjp(lambda own, passing, at: (keep(own, passing, at), at), backward)
    return with_gradient(own_ZQkTD, passing_ZQbTD, microbatch_Z)

  @property
  def _rows(self) -> int:
    """The rows of the batch that one device has in the pipeline."""
    sizes = {} if self._active is None else self._active[0].shape
    return self.shape[0] // math.prod(sizes[a] for a in self._row_axes)

  @property
  def _rows_of_stage(self) -> int:
    """k: the rows of a device that one stage owns."""
    return -(-self._rows // self.schedule.stages)

  @property
  def _batch_axes(self) -> tuple[str, ...]:
    """The mesh axes over which the rows of a part of a microbatch are split."""
    if self._active is None:
      return ()
    mesh, rules = self._active
    b = self.shape[0] // (self.schedule.microbatches * self.parts)
    (entry,) = fitting(spec(['batch'], rules), [b], dict(mesh.shape))
    return axes_of(entry)

  @property
  def _row_axes(self) -> tuple[str, ...]:
    """The mesh axes over which the rows of the batch are split, without stage."""
    parts = () if self._active is None else axes_of(self._active[1]['row_shards'])
    return parts + self._batch_axes

  @property
  def _specs(self) -> tuple[PartitionSpec, PartitionSpec]:
    """The mesh axes of [B, T, D] and of [Z, Q, rows, T, D]."""
    assert self._active is not None
    mesh, rules = self._active
    beyond = fitting(
      spec(['residual_length', 'act_embed'], rules), self.shape[1:], dict(mesh.shape)
    )
    rows = (*self._row_axes, 'stage') if self._is_split else self._row_axes
    of_stages = 'stage', axes_of(rules['row_shards']) or None, self._batch_axes or None, *beyond
    return PartitionSpec(rows or None, *beyond), PartitionSpec(*of_stages)

  @property
  def _is_split(self) -> bool:
    """Whether the rows [B, T, D] are split over stages outside the pipeline."""
    return self._rows % self.schedule.stages == 0

  def _moves(self) -> tuple[Callable[[jax.Array], jax.Array], Callable[[jax.Array], jax.Array]]:
    """Two functions between rows [B, T, D] and [Z, Q, k, T, D], each the reverse of the other."""
    Z, n, k = self.schedule.stages, self._rows, self._rows_of_stage
    padded = lambda x: jnp.pad(x, [(0, Z * k - n), (0, 0), (0, 0)])
    if self._active is None:
      shape = Z, 1, k, *self.shape[1:]
      return lambda x: padded(x).reshape(shape), lambda x: x.reshape(-1, *x.shape[3:])[:n]

    def own(x: jax.Array) -> jax.Array:
      if not self._is_split:
        x = jax.lax.dynamic_slice_in_dim(padded(x), jax.lax.axis_index('stage') * k, k)
      return x[None, None]

    def whole(x: jax.Array) -> jax.Array:
      rows = x[0, 0]
      return rows if self._is_split else jax.lax.all_gather(rows, 'stage', tiled=True)[:n]

    (mesh, _), (rows, of_stages) = self._active, self._specs
    on_mesh = lambda function, before, after: jax.shard_map(
      function, mesh=mesh, in_specs=before, out_specs=after, check_vma=False
    )
    return on_mesh(own, rows, of_stages), on_mesh(whole, of_stages, rows)

  def _copy(
    self,
    function: Callable[..., jax.Array],
    own_ZQkTD: jax.Array,
    passing_ZQbTD: jax.Array,
    microbatch_Z: jax.Array,
  ) -> jax.Array:
    """`_loaded` or `_kept` on the devices of each stage."""
    I, k = self.schedule.microbatches, self._rows_of_stage
    stages = jnp.arange(self.schedule.stages)

    def local(own: jax.Array, passing: jax.Array, at: jax.Array, stages: jax.Array) -> jax.Array:
      return function(own, passing, at, stages * k, I)

    if self._active is not None:
      _, rows = self._specs
      of_stages = PartitionSpec('stage')
      local = jax.shard_map(
        local, mesh=self._active[0], in_specs=(rows, rows, of_stages, of_stages), out_specs=rows,
        check_vma=False,
      )  # fmt: skip
    return local(own_ZQkTD, passing_ZQbTD, microbatch_Z, stages)


def _linear(
  function: Callable[[jax.Array], jax.Array], transpose: Callable[[jax.Array], jax.Array]
) -> Callable[[jax.Array], jax.Array]:
  """Returns a linear function, whose gradient `transpose` computes."""
  linear = jax.custom_vjp(function)
  linear.defvjp(lambda x: (function(x), None), lambda _, grad: (transpose(grad),))
  return linear


def _loaded(
  own: jax.Array, passing: jax.Array, microbatch: jax.Array, first: jax.Array, microbatches: int
) -> jax.Array:
  """The microbatches that pass, with the rows of the stages that are here.

  Args:
    own: The rows of these stages, [Z, 1, k, T, D].
    passing: The microbatches, [Z, 1, b, T, D].
    microbatch: Their numbers, [Z].
    first: The first row of each stage, [Z].
    microbatches: I.
  """
  for z, row, place, is_own in _places(own, passing, microbatch, first, microbatches):
    new = jax.lax.dynamic_index_in_dim(own[z, 0], place, keepdims=False)
    passing = passing.at[z, 0, row].set(jnp.where(is_own, new, passing[z, 0, row]))
  return passing


def _stored(
  own: jax.Array, passing: jax.Array, microbatch: jax.Array, first: jax.Array, microbatches: int
) -> jax.Array:
  """The rows of the stages that are here, with those that pass; arguments as of `_loaded`."""
  for z, row, place, is_own in _places(own, passing, microbatch, first, microbatches):
    at = z, 0, place, 0, 0
    old = jax.lax.dynamic_slice(own, at, (1, 1, 1, *own.shape[3:]))
    new = jnp.where(is_own, passing[z, 0, row], old)
    own = jax.lax.dynamic_update_slice(own, new, at)
  return own


def _places(
  own: jax.Array, passing: jax.Array, microbatch: jax.Array, first: jax.Array, microbatches: int
) -> Iterator[tuple[int, int, jax.Array, jax.Array]]:
  """(z, row of a microbatch, its place among the rows of the stage, whether it has one)."""
  exists = (microbatch >= 0) & (microbatch < microbatches)
  for z in range(len(own)):
    for row in range(passing.shape[2]):
      place = row * microbatches + microbatch[z] - first[z]
      yield z, row, place, exists[z] & (place >= 0) & (place < own.shape[2])
