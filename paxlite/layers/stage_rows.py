"""How the rows of a batch enter a pipeline, and leave it."""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from paxlite.parallel.partitioning import active_mesh, axes_of, fitting, shard, spec

_ROWS = ('outer_batch', 'residual_length', 'act_embed')
WAITING = ('layers', None, 'row_shards', 'batch', 'residual_length', 'act_embed')


@dataclasses.dataclass(frozen=True)
class StageRows:
  """Rows as microbatches that wait at stage 0.

  Embeddings and logits are computed by all stages, each with a part of the rows. All rows are
  gathered by every stage, and scattered from stage 0. XLA's partitioner would sum them over the
  stages, which sends twice as much.

  A microbatch takes every I-th row, so that rows stay on their devices.

  Attributes:
    stages: Z.
    microbatches: I.
    parts: Q, the number of parts of a microbatch.
  """

  stages: int
  microbatches: int
  parts: int

  def enter(self, x_BTD: jax.Array) -> jax.Array:
    """Returns the rows at every stage, [Z, I, Q, b, T, D]; only those of stage 0 are used."""
    if not self._is_split(x_BTD.shape):
      x_IQbTD = shard(self.split(x_BTD), *WAITING[1:])
      return jnp.broadcast_to(x_IQbTD, (self.stages, *x_IQbTD.shape))
    gather, scatter = self._moves(x_BTD.shape)
    enter = jax.custom_vjp(gather)
    enter.defvjp(lambda x: (gather(x), None), lambda _, grad: (scatter(grad),))
    return enter(x_BTD)

  def leave(self, waiting_ZIQbTD: jax.Array) -> jax.Array:
    """Returns the rows [B, T, D] that wait at stage 0."""
    shape = math.prod(waiting_ZIQbTD.shape[1:4]), *waiting_ZIQbTD.shape[4:]
    if not self._is_split(shape):
      is_first = (jnp.arange(self.stages) == 0).reshape(-1, 1, 1, 1, 1, 1)
      # selected by a mask, because slicing a sharded dimension would gather it
      y_IQbTD = shard(jnp.where(is_first, waiting_ZIQbTD, 0).sum(0), *WAITING[1:])
      return _rows(y_IQbTD)
    gather, scatter = self._moves(shape)

    def backward(_: None, grad: jax.Array) -> tuple[jax.Array]:
      return (gather(grad),)

    leave = jax.custom_vjp(scatter)
    leave.defvjp(lambda x: (scatter(x), None), backward)
    return leave(waiting_ZIQbTD)

  def split(self, x: jax.Array) -> jax.Array:
    """[B, …] as [I, Q, b, …]."""
    split = x.reshape(-1, self.microbatches, *x.shape[1:]).swapaxes(0, 1)
    return split.reshape(self.microbatches, self.parts, -1, *x.shape[1:])

  def _is_split(self, shape: tuple[int, ...]) -> bool:
    """Whether every stage can have a part of the rows that each device's microbatches have."""
    active = active_mesh()
    if active is None:
      return False
    sizes = active[0].shape
    shards = math.prod(sizes[a] for a in (*self._row_axes, 'stage'))
    return shape[0] % (shards * self.microbatches // math.gcd(self.microbatches, self.stages)) == 0

  @property
  def _row_axes(self) -> tuple[str, ...]:
    active = active_mesh()
    assert active is not None
    return axes_of(active[1]['row_shards']) + axes_of(active[1]['batch'])

  def _moves(
    self, shape: tuple[int, ...]
  ) -> tuple[Callable[[jax.Array], jax.Array], Callable[[jax.Array], jax.Array]]:
    """Two functions between rows [B, T, D] and [Z, I, Q, b, T, D], each the transpose of the other.

    The first one leaves zeros at the stages after stage 0.
    """
    active = active_mesh()
    assert active is not None
    mesh, rules = active
    sizes = dict(mesh.shape)
    beyond = fitting(spec(_ROWS[1:], rules), shape[1:], sizes)
    rows = PartitionSpec((*self._row_axes, 'stage'), *beyond)
    waiting = PartitionSpec(
      'stage', None, axes_of(rules['row_shards']) or None, axes_of(rules['batch']) or None, *beyond
    )
    is_first = lambda: jax.lax.axis_index('stage') == 0

    def gather(x: jax.Array) -> jax.Array:
      x = jax.lax.all_gather(x, 'stage', tiled=True)
      x = x.reshape(-1, self.microbatches, *x.shape[1:]).swapaxes(0, 1)
      return jnp.where(is_first(), x, 0)[None, :, None]

    def scatter(x: jax.Array) -> jax.Array:
      x = jnp.where(is_first(), x, 0)[0, :, 0]
      x = x.swapaxes(0, 1).reshape(-1, *x.shape[2:])
      return jax.lax.psum_scatter(x, 'stage', scatter_dimension=0, tiled=True)

    return (
      jax.shard_map(gather, mesh=mesh, in_specs=rows, out_specs=waiting, check_vma=False),
      jax.shard_map(scatter, mesh=mesh, in_specs=waiting, out_specs=rows, check_vma=False),
    )


def _rows(x_IQb: jax.Array) -> jax.Array:
  """[I, Q, b, …] as [B, …]."""
  I, *_ = x_IQb.shape
  return x_IQb.reshape(I, -1, *x_IQb.shape[3:]).swapaxes(0, 1).reshape(-1, *x_IQb.shape[3:])
