"""Generation beside training: devices of its own, the parameters on them, and its thread."""

import concurrent.futures
import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from paxlite.core.errors import UserError
from paxlite.core.trees import PyTree
from paxlite.parallel import partitioning


def training_devices(mesh_size: int, count: int) -> list[jax.Device] | None:
  """Returns the first `mesh_size` devices, which train while the last `count` ones generate.

  None, for all of them, where the mesh takes all, as in a command that only loads the model.

  Raises:
    UserError: There are not as many devices as both need.
  """
  return None if len(jax.devices()) == mesh_size else _devices(mesh_size, count)[:mesh_size]


def rollout_mesh(mesh_size: int, count: int, axes: Sequence[str]) -> Mesh:
  """Returns the mesh of the last `count` devices, all along data; see `training_devices`."""
  if jax.process_count() > 1:
    raise UserError(
      f'ROLLOUT_DEVICES={count} is for one process, and this run has {jax.process_count()}: '
      'ROLLOUT_DEVICES=0'
    )
  devices = _devices(mesh_size, count)[mesh_size:]
  shape = [count if axis == 'data' else 1 for axis in axes]
  return Mesh(np.reshape(devices, shape), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def _devices(mesh_size: int, count: int) -> list[jax.Device]:
  found = jax.devices()
  if (left := len(found) - count) != mesh_size:
    way_out = f'choose ICI_MESH_SHAPE for {left}' if left > 0 else 'ROLLOUT_DEVICES=0'
    raise UserError(
      f'ROLLOUT_DEVICES={count} beside a mesh of {mesh_size}, ICI_MESH_SHAPE × DCN_MESH_SHAPE, '
      f'needs {mesh_size + count} devices, of which {len(found)} are present: {way_out}'
    )
  return found


def placed(params: PyTree, mesh: Mesh) -> PyTree:
  """Returns parameters on a mesh, split over its axes as they are on theirs.

  Those that are on its devices stay as they are. Others are copied, so that the next step may
  overwrite them.
  """
  if all(x.sharding.device_set == {*mesh.devices.flat} for x in jax.tree.leaves(params)):
    return params

  def sharding(x: jax.Array) -> NamedSharding:
    spec = getattr(x.sharding, 'spec', PartitionSpec())
    return NamedSharding(mesh, partitioning.fitting(spec, x.shape, dict(mesh.shape)))

  return jax.device_put(params, jax.tree.map(sharding, params))


class Generation[T]:
  """Makes rollouts before they are trained on, one after the other: in a thread, or each at once.

  Rollout n is begun when n − `ahead` is drawn, whether training waits for others or not, so that
  the same parameters write it however long anything takes.

  A run that continues from a save has the parameters of that step, and draws next. What was begun
  before the save was begun at an earlier draw, by parameters that are gone then. So a save, and
  nothing else, waits until all that was begun before it is in files: see `wait`.

  Args:
    ahead: How many rollouts are made before the one that is trained on.
    beside: Whether there is a thread.

  Attributes:
    made: Those that are not trained on yet, by number, some of which are being made.
    next: The number of the first one that was not begun.
  """

  def __init__(self, ahead: int, beside: bool):
    self._ahead, self._beside = ahead, beside
    self.made: dict[int, Future[T]] = {}
    self.next = 0
    self._thread: concurrent.futures.ThreadPoolExecutor | None = None
    self._is_closed = False
    self._ended = self._waited = self._blocked = 0.0

  def draw(self, number: int, make: Callable[[int, PyTree], T], placed: Callable[[], PyTree]) -> T:
    """Returns a rollout, after further ones were begun.

    Args:
      number: Its number.
      make: Makes one by its number and parameters.
      placed: Returns the newest parameters where they generate.
    """
    for old in [rollout for rollout in self.made if rollout < number]:  # after a rollback
      del self.made[old]
    wanted = [n for n in range(number, number + self._ahead + 1) if n not in self.made]
    params = placed() if wanted else None
    self._is_closed = False
    for rollout in wanted:
      self.made[rollout] = self._begun(functools.partial(make, rollout), params)
      self.next = max(self.next, rollout + 1)
    return self.made.pop(number).result()

  def finished(self) -> tuple[int, int, dict[int, T]]:
    """Returns the first numbers of those not finished and not begun, and what is finished before.

    One that has failed counts as not begun: it raises its error when it is drawn.
    """
    over = {n: one for n, one in self.made.items() if one.done()}  # of one moment
    failed = [n for n, one in over.items() if one.cancelled() or one.exception()]
    begun = min([self.next, *failed])
    next_ = min([begun, *(self.made.keys() - over.keys())])
    return next_, begun, {n: over[n].result() for n in sorted(over) if n < next_}

  def wait(self, end: int) -> None:
    """Waits until those before the number `end` are made, or have failed."""
    start = time.perf_counter()
    concurrent.futures.wait([one for n, one in self.made.items() if n < end])
    self._blocked += time.perf_counter() - start

  def _begun(self, make: Callable[[PyTree], T], params: PyTree) -> Future[T]:
    if not self._beside:
      return done(make(params))
    if self._thread is None:
      self._thread = concurrent.futures.ThreadPoolExecutor(1, 'generation')
    return self._thread.submit(self._in_thread, make, params)

  def _in_thread(self, make: Callable[[PyTree], T], params: PyTree) -> T:
    jax.block_until_ready(params)
    self._waited += time.perf_counter() - self._ended if self._ended else 0.0
    try:
      return make(params)
    finally:
      self._ended = time.perf_counter()

  def measured(self, start: float) -> dict[str, float]:
    """Returns metrics: the seconds that training and the thread waited since the last call.

    Args:
      start: When the last rollout was drawn.
    """
    blocked, waited, self._blocked, self._waited = self._blocked, self._waited, 0.0, 0.0
    blocked += time.perf_counter() - start
    return {'wait_for_rollouts_seconds': blocked, 'wait_for_training_seconds': waited}

  def check(self) -> None:
    """Raises CancelledError in a rollout that is being made after its run has ended."""
    if self._is_closed:
      raise concurrent.futures.CancelledError

  def close(self) -> None:
    """Ends the thread, and what it makes."""
    self._is_closed, thread, self._thread = True, self._thread, None
    if thread is not None:
      thread.shutdown(cancel_futures=True)


def done[T](value: T) -> Future[T]:
  """Returns a future with its result."""
  found: Future[T] = Future()
  found.set_result(value)
  return found
