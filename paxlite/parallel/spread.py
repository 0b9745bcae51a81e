"""Whole matrices on each device, for optimizers that multiply them, and the way back."""

from collections.abc import Sequence

import jax
from jax.sharding import NamedSharding, PartitionSpec

from paxlite.parallel.partitioning import active_mesh, axes_of, fitting, spec


class Spread:
  """Spreads whole matrices over all devices of the active mesh, and brings them back.

  Arrays [S, I, O] have their S matrices split over the devices, where their dimensions I and O were
  before. One mesh axis after the other is exchanged, so that no device holds more than it has to:
  XLA gathers the whole array where two axes change places at a time.

  Attributes:
    size: The number of devices, which must divide S.
  """

  def __init__(self, axes: Sequence[Sequence[str]]) -> None:
    """Takes the mesh axes over which S, I and O are split."""
    active = active_mesh()
    self.size = active[0].size if active else 1
    self._shardings: list[NamedSharding] = []
    if active is None or self.size == 1:
      return
    mesh, _ = active
    stacked, inputs, outputs = map(tuple, axes)
    rest = tuple(a for a in mesh.axis_names if a not in stacked + inputs + outputs)
    self._shardings = [
      NamedSharding(mesh, PartitionSpec(*(part or None for part in parts)))
      for parts in (
        (stacked, inputs, outputs), (stacked + inputs, (), outputs),
        (stacked + inputs + outputs, (), ()), (stacked + inputs + outputs + rest, (), ()),
      )
    ]  # fmt: skip

  def spread(self, x: jax.Array) -> jax.Array:
    """Returns matrices [S, I, O], each as a whole on one device."""
    for sharding in self._shardings:
      x = jax.lax.with_sharding_constraint(x, sharding)
    return x

  def brought_back(self, x: jax.Array) -> jax.Array:
    """Returns matrices [S, I, O], split as they were before `spread`."""
    for sharding in reversed(self._shardings):
      x = jax.lax.with_sharding_constraint(x, sharding)
    return x


def mesh_axes(shape: Sequence[int], names: Sequence[str | None]) -> list[tuple[str, ...]]:
  """Returns the axes of the active mesh over which each dimension of an array is split."""
  active = active_mesh()
  if active is None or not names:
    return [()] * len(shape)
  mesh, rules = active
  entries = fitting(spec(names, rules), shape, dict(mesh.shape))
  return [tuple(a for a in axes_of(entry) if mesh.shape[a] > 1) for entry in entries]
