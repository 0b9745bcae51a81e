"""Sums of the bits of arrays, for each device's part of them.

Two sums of 32 bits: that of the bits sees any single flipped bit, and that of the mixed bits times
their places sees numbers that have changed places, but for one case in four billion. They are
computed where the arrays are, which reads them once.
"""

import collections
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from paxlite.core.trees import PyTree
from paxlite.core.variable_names import path_name

_ODD = 2_654_435_761  # 2^32 over the golden ratio: neighboring places have very different factors


def bits(x: jax.Array) -> jax.Array:
  """Returns the bits of numbers as unsigned integers of their width; integers stay as they are."""
  if jnp.issubdtype(x.dtype, jnp.floating):
    return jax.lax.bitcast_convert_type(x, f'uint{8 * x.dtype.itemsize}')
  return x


class ShardSums:
  """Computes the sums of trees of arrays on a mesh.

  Args:
    mesh: The devices. In the results they have the order of `mesh.devices.flat`.
  """

  def __init__(self, mesh: Mesh):
    self._mesh = mesh
    replicated = NamedSharding(mesh, PartitionSpec())
    self._jitted = jax.jit(self._sums, static_argnums=0, out_shardings=replicated)

  def __call__(self, arrays: Sequence[jax.Array]) -> np.ndarray:
    """Returns the sums of arrays on this mesh, [devices, arrays, 2], the same in every process."""
    specs = tuple(_spec(x) for x in arrays)
    return np.asarray(self._jitted(specs, *arrays))

  def _sums(self, specs: tuple[PartitionSpec, ...], *arrays: jax.Array) -> jax.Array:
    def local(*parts: jax.Array) -> jax.Array:
      return jnp.stack([_of_part(x) for x in parts])[None]

    every = PartitionSpec(self._mesh.axis_names)
    return jax.shard_map(
      local, mesh=self._mesh, in_specs=specs, out_specs=every, check_vma=False
    )(*arrays)  # fmt: skip


def _spec(x: jax.Array) -> PartitionSpec:
  sharding = x.sharding
  return sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()


def _of_part(x: jax.Array) -> jax.Array:
  numbers = bits(x).reshape(-1).astype(jnp.uint32)
  places = jax.lax.iota(jnp.uint32, numbers.size) * jnp.uint32(_ODD) | jnp.uint32(1)
  # the constants of the last steps of MurmurHash3, after which each bit depends on all others
  mixed = (numbers ^ numbers >> 16) * jnp.uint32(0x85EBCA6B)
  mixed = (mixed ^ mixed >> 13) * jnp.uint32(0xC2B2AE35)
  mixed = mixed ^ mixed >> 16
  return jnp.stack([numbers.sum(dtype=jnp.uint32), (mixed * places).sum(dtype=jnp.uint32)])


def on_devices(tree: PyTree) -> tuple[list[str], list[jax.Array]]:
  """Returns the names and the arrays of a tree that are in the memory of devices."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  kept = [(path_name(path), x) for path, x in leaves if x.sharding.memory_kind != 'pinned_host']
  return [name for name, _ in kept], [x for _, x in kept]


def odd_copies(
  names: Sequence[str], arrays: Sequence[jax.Array], sums: np.ndarray, mesh: Mesh
) -> list[str]:
  """Returns a text for each array with different copies on several devices.

  Args:
    names: The names of the arrays.
    sums: Their sums.
    mesh: The devices.
  """
  found = []
  for j, (name, x) in enumerate(zip(names, arrays, strict=True)):
    if (sums[:, j] == sums[:1, j]).all():
      continue
    indices = x.sharding.devices_indices_map(x.shape)
    copies: dict[str, list[int]] = collections.defaultdict(list)
    for position, device in enumerate(mesh.devices.flat):
      copies[str(indices[device])].append(position)
    for positions in copies.values():
      wrong = minority([sums[p, j].tobytes() for p in positions])
      if wrong:
        where = described([mesh.devices.flat[positions[i]] for i in wrong])
        what = 'one of its copies is wrong' if 2 * len(wrong) >= len(positions) else 'it is wrong'
        found.append(f'{name} on {where}: {what}')
  return found


def minority(values: Sequence[object]) -> list[int]:
  """Returns the places of the values that most others are not equal to; all where there is no most.

  There are none where all are equal.
  """
  counted = collections.Counter(values)
  if len(counted) == 1:
    return []
  ((value, most),) = counted.most_common(1)
  if 2 * most > len(values):
    return [i for i, x in enumerate(values) if x != value]
  return list(range(len(values)))


def described(devices: Sequence[jax.Device]) -> str:
  """Returns devices as messages name them."""
  several = len({d.process_index for d in devices}) > 1 or jax.process_count() > 1
  one = lambda d: f'device {d.id}' + (f' of process {d.process_index}' if several else '')
  return ' and '.join(map(one, sorted(devices, key=lambda d: (d.process_index, d.id))))
