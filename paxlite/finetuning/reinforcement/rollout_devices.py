"""Generation beside training: devices of its own, the parameters on them, and its thread."""

import concurrent.futures
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from paxlite.core import shell
from paxlite.core.errors import UserError
from paxlite.core.trees import PyTree
from paxlite.parallel import partitioning


def training_devices(mesh_size: int, count: int, axes: Sequence[str]) -> list[jax.Device] | None:
  """Returns the devices that train while the last `count` ones generate; None: all of them.

  Where the mesh takes all devices, as in a command that only loads the model, none is left out.

  Args:
    mesh_size: The number of devices of the mesh that trains.
    count: The number of devices that generate, at least 1.
    axes: The axes of the mesh.

  Raises:
    UserError: There are not as many devices as both need.
  """
  return None if len(jax.devices()) == mesh_size else _divided(mesh_size, count, axes)[0]


def rollout_mesh(mesh_size: int, count: int, axes: Sequence[str]) -> Mesh:
  """Returns the mesh of the last `count` devices, all along data; see `training_devices`."""
  _, devices = _divided(mesh_size, count, axes)
  shape = [count if axis == 'data' else 1 for axis in axes]
  return Mesh(np.reshape(devices, shape), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def _divided(
  mesh_size: int, count: int, axes: Sequence[str]
) -> tuple[list[jax.Device], list[jax.Device]]:
  if jax.process_count() > 1:
    raise UserError(
      f'ROLLOUT_DEVICES={count} is for one process, and this run has {jax.process_count()}: '
      'ROLLOUT_DEVICES=0'
    )
  found = jax.devices()
  if len(found) != mesh_size + count:
    left = len(found) - count
    all_data = [left if axis == 'data' else 1 for axis in axes]
    way_out = f'for example {shell.flag("ICI_MESH_SHAPE", all_data)}'
    raise UserError(
      f'ROLLOUT_DEVICES={count} beside a mesh of {mesh_size}, ICI_MESH_SHAPE × DCN_MESH_SHAPE, '
      f'needs {mesh_size + count} devices, but {len(found)} {"is" if len(found) == 1 else "are"} '
      f'present: {way_out if left > 0 else "ROLLOUT_DEVICES=0"}'
    )
  return found[:mesh_size], found[mesh_size:]


def placed(params: PyTree, mesh: Mesh) -> PyTree:
  """Returns parameters on a mesh, split over its axes as they are on theirs.

  Those that are on its devices stay as they are. Others are copied, so that the next step may
  overwrite them.
  """
  here = set(mesh.devices.flat)
  if all(x.sharding.device_set == here for x in jax.tree.leaves(params)):
    return params

  def sharding(x: jax.Array) -> NamedSharding:
    spec = getattr(x.sharding, 'spec', PartitionSpec())
    return NamedSharding(mesh, partitioning.fitting(spec, x.shape, dict(mesh.shape)))

  return jax.device_put(params, jax.tree.map(sharding, params))


class Generation:
  """Makes rollouts one after the other: in a thread, or each at once.

  Args:
    beside: Whether there is a thread.
  """

  def __init__(self, beside: bool):
    self._beside = beside
    self._thread: concurrent.futures.ThreadPoolExecutor | None = None
    self._closed = False
    self._ended = self._waited = 0.0

  def begin[T](self, make: Callable[[PyTree], T], params: PyTree) -> concurrent.futures.Future[T]:
    """Begins to make a rollout by parameters, which the thread waits for."""
    if not self._beside:
      return done(make(params))
    if self._thread is None:
      self._thread, self._closed = concurrent.futures.ThreadPoolExecutor(1, 'generation'), False
    return self._thread.submit(self._made, make, params)

  def _made[T](self, make: Callable[[PyTree], T], params: PyTree) -> T:
    jax.block_until_ready(params)
    self._waited += time.perf_counter() - self._ended if self._ended else 0.0
    try:
      return make(params)
    finally:
      self._ended = time.perf_counter()

  def waited(self) -> float:
    """Returns the seconds that the thread has waited for parameters since the last call."""
    seconds, self._waited = self._waited, 0.0
    return seconds

  def check(self) -> None:
    """Ends a rollout that is being made for a run that has ended, by a CancelledError."""
    if self._closed:
      raise concurrent.futures.CancelledError

  def close(self) -> None:
    """Ends the thread, and what it makes."""
    self._closed, thread, self._thread = True, self._thread, None
    if thread is not None:
      thread.shutdown(cancel_futures=True)


def done[T](value: T) -> concurrent.futures.Future[T]:
  """Returns a future with its result."""
  found: concurrent.futures.Future[T] = concurrent.futures.Future()
  found.set_result(value)
  return found
