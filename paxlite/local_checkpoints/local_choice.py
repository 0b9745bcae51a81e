"""Chooses the newest local state that the processes of a run can complete together.

A device needs its part of every variable. The part comes from a file on its host, or from a
replica: a device that holds the same parts of all variables, and whose host has the file. The
processes agree by collectives, so all of them choose the same state.
"""

import json
import logging
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from paxlite.core.json_text import JsonObject, parsed
from paxlite.core.trees import PyTree
from paxlite.core.variable_names import path_name
from paxlite.local_checkpoints.local_files import (
  Bounds,
  DamagedError,
  Key,
  LocalFile,
  LocalFolder,
  Name,
)
from paxlite.processes.process_messages import broadcast

_OFFERED = 8  # the newest states of each process that are considered

log = logging.getLogger('paxlite')


def bounds_of(index: Sequence[slice], shape: Sequence[int]) -> Bounds:
  """Returns the first and the last index + 1 of a part of an array along each dimension."""
  return tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))


def newest(
  files: LocalFolder, names: Sequence[Name], abstract: PyTree, experiment: int | None
) -> tuple[int, PyTree, JsonObject] | None:
  """Returns the newest state that all processes can complete: its step, tree and metadata.

  Every process must call this.

  Args:
    files: The local states of the run on this host.
    names: The names of those files that belong to the history of the run.
    abstract: A tree of jax.ShapeDtypeStruct with the shapes, dtypes and shardings of a state.
    experiment: A number that identifies the experiment; states of other experiments are not used.
      None allows any experiment.

  Returns:
    None if there is no such state.
  """
  wanted = _Wanted(abstract)
  for step, branch in _offered(names):
    mine = [n for n in names if (n.step, n.branch) == (step, branch)]
    parts, metadata = wanted.read(files, mine, experiment)
    has = _all(np.array([wanted.is_complete(d, parts) for d in wanted.devices], np.int32)).max(0)
    donors = wanted.donors(has)
    noted = _all(np.array([metadata is not None], np.int32)).ravel()
    if donors is not None and noted.any():
      text = broadcast(json.dumps(metadata).encode(), source=int(noted.argmax()))
      return step, wanted.tree(parts, donors), parsed(text) if metadata is None else metadata
    if jax.process_index() == 0:
      log.warning(
        'the local state of step %d is incomplete and not used: %d of %d devices have their part',
        step, int(has.sum()), len(has),
      )  # fmt: skip
  return None


class _Wanted:
  """The parts of a state that each device of a mesh needs.

  Attributes:
    devices: The devices of the mesh, in its order.
  """

  def __init__(self, abstract: PyTree):
    leaves, self._structure = jax.tree_util.tree_flatten_with_path(abstract)
    self._variables = [(path_name(path), leaf) for path, leaf in leaves]
    self.devices = list(leaves[0][1].sharding.mesh.devices.flat)
    maps = [leaf.sharding.devices_indices_map(leaf.shape) for _, leaf in leaves]
    self._keys: list[list[Key]] = [
      [
        (name, bounds_of(found[d], leaf.shape))
        for (name, leaf), found in zip(self._variables, maps, strict=True)
      ]
      for d in self.devices
    ]

  def read(
    self, files: LocalFolder, names: Sequence[Name], experiment: int | None
  ) -> tuple[dict[Key, np.ndarray], JsonObject | None]:
    """Returns the parts that the devices of this process need, as far as they are in files.

    Returns:
      The parts, and the metadata of one of the files; None if no file is good.
    """
    opened: list[LocalFile] = []
    for name in names:
      try:
        file = files.open(name)
        if file.metadata.get('step') != name.step or not isinstance(
          file.metadata.get('batch_size'), int
        ):
          raise DamagedError(
            f'{files.path / str(name)} is damaged (it has no metadata of its step)'
          )
      except DamagedError as e:
        log.warning('%s', e)
        continue
      if experiment in (None, file.metadata.pop('experiment', None)):
        opened.append(file)
      else:
        log.warning('the local state of step %d belongs to another experiment', name.step)
    parts: dict[Key, np.ndarray] = {}
    for device, keys in zip(self.devices, self._keys, strict=True):
      if device.process_index != jax.process_index():
        continue
      for key, (_, leaf) in zip(keys, self._variables, strict=True):
        for file in opened:
          if key not in parts and file.dtype(key) == leaf.dtype:
            try:
              parts[key] = file.read(key)
            except DamagedError as e:
              log.warning('%s', e)
    return parts, opened[0].metadata if opened else None

  def is_complete(self, device: jax.Device, parts: Mapping[Key, np.ndarray]) -> bool:
    """Returns whether the parts are all that a device needs; False for devices of others."""
    keys = self._keys[self.devices.index(device)]
    return device.process_index == jax.process_index() and all(key in parts for key in keys)

  def donors(self, has: np.ndarray) -> list[int] | None:
    """Returns the number of the device that gives each device its parts; None if one lacks them.

    Args:
      has: Whether the host of each device has its parts [devices].
    """
    holders: dict[tuple[Key, ...], list[int]] = {}
    for d, keys in enumerate(self._keys):
      if has[d]:
        holders.setdefault(tuple(keys), []).append(d)
    found = []
    for d, keys in enumerate(self._keys):
      replicas = [d] if has[d] else holders.get(tuple(keys), [])
      if not replicas:
        return None
      found.append(replicas[d % len(replicas)])
    return found

  def tree(self, parts: Mapping[Key, np.ndarray], donors: Sequence[int]) -> PyTree:
    """Makes the arrays of the state from the parts that this process has and receives."""
    arrays = []
    for v, (_, leaf) in enumerate(self._variables):
      shape = leaf.sharding.shard_shape(leaf.shape)
      own = {
        d: parts.get(self._keys[i][v], np.zeros(shape, leaf.dtype))
        for i, d in enumerate(self.devices)
        if d.process_index == jax.process_index()
      }
      held = {d: jax.device_put(x, d) for d, x in own.items()}
      for pairs in _rounds(donors):
        held |= _moved(held, self.devices, pairs)
      kind = leaf.sharding.memory_kind
      single = [
        jax.device_put(held[d], SingleDeviceSharding(d, memory_kind=kind))
        for d in leaf.sharding.addressable_devices_indices_map(leaf.shape)
      ]
      arrays.append(jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, single))
    return jax.tree_util.tree_unflatten(self._structure, arrays)


def _offered(names: Sequence[Name]) -> list[tuple[int, str]]:
  """Returns the steps and branches of the states of all processes, the newest first."""
  own = sorted({(n.step, n.branch) for n in names}, reverse=True)[:_OFFERED]
  table = np.full((_OFFERED, 3), -1, np.int32)
  for row, (step, branch) in zip(table, own, strict=False):
    row[:] = step, int(branch[:4], 16), int(branch[4:], 16)
  rows = {tuple(row.tolist()) for row in _all(table).reshape(-1, 3) if row[0] >= 0}
  return [(step, f'{high:04x}{low:04x}') for step, high, low in sorted(rows, reverse=True)]


def _all(mine: np.ndarray) -> np.ndarray:
  """Returns the arrays of all processes [P, …]."""
  if jax.process_count() == 1:
    return mine[None]
  return np.asarray(multihost_utils.process_allgather(mine)).reshape(-1, *mine.shape)


def _rounds(donors: Sequence[int]) -> list[list[tuple[int, int]]]:
  """Returns the transfers (from, to); in each round, a device gives to one other at most."""
  left = [(donor, d) for d, donor in enumerate(donors) if donor != d]
  rounds = []
  while left:
    now = {donor: (donor, d) for donor, d in reversed(left)}
    rounds.append(sorted(now.values()))
    left = [pair for pair in left if pair not in rounds[-1]]
  return rounds


def _moved(
  held: Mapping[jax.Device, jax.Array], devices: Sequence[jax.Device], pairs: list[tuple[int, int]]
) -> dict[jax.Device, jax.Array]:
  """Returns the arrays that devices of this process receive from others, by device."""
  mesh = Mesh(np.array(devices), ('device',), axis_types=(AxisType.Auto,))
  one_each = PartitionSpec('device')
  shape = (len(devices), *next(iter(held.values())).shape)
  whole = jax.make_array_from_single_device_arrays(
    shape, NamedSharding(mesh, one_each), [x[None] for x in held.values()]
  )
  move = lambda x: jax.lax.ppermute(x, 'device', pairs)
  moved = jax.jit(jax.shard_map(move, mesh=mesh, in_specs=one_each, out_specs=one_each))(whole)
  receivers = {devices[to] for _, to in pairs}
  return {s.device: s.data[0] for s in moved.addressable_shards if s.device in receivers}
