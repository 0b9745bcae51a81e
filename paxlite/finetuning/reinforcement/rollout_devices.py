"""Generation beside training: devices of its own, the parameters on them, and when it runs."""

import collections
import concurrent.futures
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from paxlite.core.errors import UserError
from paxlite.core.trees import PyTree
from paxlite.parallel import partitioning
from paxlite.processes import process_messages

_Part = tuple[tuple[int, int], ...]  # where a part of an array begins and ends


def training_devices(
  mesh_size: int, count: int, devices: Sequence[jax.Device] | None = None
) -> list[jax.Device] | None:
  """Returns the devices that train while the last ones of each process generate.

  None, for all of them, where the mesh takes all, as in a command that only loads the model.

  Args:
    mesh_size: How many train.
    count: How many generate.
    devices: All of them; None: those that are present.

  Raises:
    UserError: There are not as many devices as both need, or processes cannot share them equally.
  """
  found = jax.devices() if devices is None else devices
  if len(found) == mesh_size:
    return None
  generating = _generating(found, mesh_size, count)
  return [device for device in found if device not in generating]


def rollout_mesh(mesh_size: int, count: int, axes: Sequence[str]) -> Mesh:
  """Returns the mesh of the devices that generate, all along data; see `training_devices`."""
  devices = _generating(jax.devices(), mesh_size, count)
  shape = [count if axis == 'data' else 1 for axis in axes]
  mesh = Mesh(np.reshape(devices, shape), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
  if jax.process_count() > 1:
    process_messages.send_beside(devices)
    over = NamedSharding(mesh, PartitionSpec('data'))  # they connect now, as meet() says
    zeros = jax.make_array_from_callback((count,), over, lambda i: np.zeros(count, np.int32)[i])
    jax.block_until_ready(_whole(mesh)(zeros))
  return mesh


def _generating(found: Sequence[jax.Device], mesh_size: int, count: int) -> list[jax.Device]:
  if (left := len(found) - count) != mesh_size:
    way_out = f'choose ICI_MESH_SHAPE for {left}' if left > 0 else 'ROLLOUT_DEVICES=0'
    raise UserError(
      f'ROLLOUT_DEVICES={count} beside a mesh of {mesh_size}, ICI_MESH_SHAPE × DCN_MESH_SHAPE, '
      f'needs {mesh_size + count} devices, of which {len(found)} are present: {way_out}'
    )
  of: dict[int, list[jax.Device]] = {}
  for device in found:
    of.setdefault(device.process_index, []).append(device)
  each, rest = divmod(count, len(of))
  if rest or any(len(own) <= each for own in of.values()):
    raise UserError(
      f'ROLLOUT_DEVICES={count} gives each of {len(of)} processes {count / len(of):g} of its '
      f'{min(map(len, of.values()))} devices: each needs the same number, and one left that trains'
    )
  return [device for own in of.values() for device in own[len(own) - each :]]


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

  shardings = jax.tree.map(sharding, params)
  if jax.process_count() == 1:
    return jax.device_put(params, shardings)
  return jax.tree.map(_copied, params, shardings)


def _copied(x: jax.Array, sharding: NamedSharding) -> jax.Array:
  """Returns an array on other devices of the same processes, each of which copies its own parts.

  JAX copies no array between other sets of devices of several processes. A process that lacks parts
  gets the whole array by a program of the devices that have it. It is waited for, so that one whole
  array at a time takes memory.
  """
  has, needs = _parts_of(x.sharding, x.shape), _parts_of(sharding, x.shape)
  is_there = all(parts <= has.get(process, set()) for process, parts in needs.items())
  source = x if is_there else _whole(x.sharding.mesh)(x)  # type: ignore[attr-defined]
  here = {_part(shard.index, x.shape): shard.data for shard in source.addressable_shards}
  everything = _part((slice(None),) * x.ndim, x.shape)

  def of(index: tuple[slice, ...]) -> jax.Array:
    found = here.get(_part(index, x.shape))
    return here[everything][index] if found is None else found

  indices = sharding.addressable_devices_indices_map(x.shape)
  arrays = [jax.device_put(of(index or ()), device) for device, index in indices.items()]
  if not is_there:
    jax.block_until_ready(arrays)
  return jax.make_array_from_single_device_arrays(x.shape, sharding, arrays)


def _parts_of(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> dict[int, set[_Part]]:
  """Returns the parts of an array that each process has."""
  found: dict[int, set[_Part]] = {}
  indices: Mapping[jax.Device, tuple[slice, ...] | None] = sharding.devices_indices_map(shape)
  for device, index in indices.items():
    found.setdefault(device.process_index, set()).add(_part(index, shape))
  return found


def _part(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> _Part:
  return tuple(i.indices(n)[:2] for i, n in zip(index or (), shape, strict=True))


@functools.cache
def _whole(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
  return jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))


class Generation[T]:
  """Makes rollouts before they are trained on, one after the other: in a thread, or each at once.

  Rollout n is begun when n − `ahead` is drawn, whether training waits for others or not, so that
  the same parameters write it however long anything takes.

  Processes must start their programs in one order, which several threads would not. So each of
  several processes has `Turns`, in which the next draw makes what was begun: the step of before is
  dispatched by then, and its devices compute it meanwhile.

  A run that continues from a save has the parameters of that step, and draws next. What was begun
  before the save was begun at an earlier draw, by parameters that are gone then. So a save, and
  nothing else, waits until all that was begun before it is in files: see `wait`.

  Args:
    ahead: How many rollouts are made before the one that is trained on.
    beside: Whether they are made while training goes on.

  Attributes:
    made: Those that are not trained on yet, by number, some of which are being made.
    next: The number of the first one that was not begun.
  """

  def __init__(self, ahead: int, beside: bool):
    self._ahead, self._beside = ahead, beside
    self.made: dict[int, Future[T]] = {}
    self.next = 0
    self._maker: concurrent.futures.ThreadPoolExecutor | Turns | None = None
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
    self._take_turns()
    wanted = [n for n in range(number, number + self._ahead + 1) if n not in self.made]
    params = placed() if wanted else None
    self._is_closed = False
    for rollout in wanted:
      self.made[rollout] = self._begun(functools.partial(make, rollout), params)
      self.next = max(self.next, rollout + 1)
    drawn = self.made.pop(number)
    self._take_turns(drawn)
    return drawn.result()

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
    self._take_turns()
    concurrent.futures.wait([one for n, one in self.made.items() if n < end])
    self._blocked += time.perf_counter() - start

  def _begun(self, make: Callable[[PyTree], T], params: PyTree) -> Future[T]:
    if not self._beside:
      return done(make(params))
    if self._maker is None:
      threads = concurrent.futures.ThreadPoolExecutor
      self._maker = Turns() if jax.process_count() > 1 else threads(1, 'generation')
    return self._maker.submit(self._timed, make, params)

  def _take_turns(self, until: Future[T] | None = None) -> None:
    """Makes what was begun, or as much until one is made, where no thread does."""
    if isinstance(self._maker, Turns):
      self._maker.take(until)

  def _timed(self, make: Callable[[PyTree], T], params: PyTree) -> T:
    jax.block_until_ready(params)
    self._waited += time.perf_counter() - self._ended if self._ended else 0.0
    try:
      return make(params)
    finally:
      self._ended = time.perf_counter()

  def measured(self, start: float) -> dict[str, float]:
    """Returns metrics: the seconds that training and generation waited since the last call.

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
    self._is_closed, maker, self._maker = True, self._maker, None
    if maker is not None:
      maker.shutdown(cancel_futures=True)


class Turns:
  """An executor without a thread, which computes when it is told to."""

  def __init__(self) -> None:
    self._begun: collections.deque[tuple[Future, Callable[[], object]]] = collections.deque()

  def submit[**P, R](
    self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs
  ) -> Future[R]:
    found: Future[R] = Future()
    self._begun.append((found, functools.partial(function, *args, **kwargs)))
    return found

  def take(self, until: Future | None = None) -> None:
    """Computes in order what was begun; ends when `until` is done, if there is one."""
    while self._begun and not (until is not None and until.done()):
      future, function = self._begun.popleft()
      try:
        future.set_result(function())
      except Exception as e:
        future.set_exception(e)

  def shutdown(self, cancel_futures: bool) -> None:
    for future, _ in self._begun:
      future.cancel()
    self._begun.clear()


def done[T](value: T) -> Future[T]:
  """Returns a future with its result."""
  found: Future[T] = Future()
  found.set_result(value)
  return found
