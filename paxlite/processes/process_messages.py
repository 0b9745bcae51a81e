"""Small messages between the processes of a run, through collectives of the devices."""

import functools
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from paxlite.cli.terminal import say
from paxlite.core.errors import UserError

_beside: list[jax.Device] = []  # one device of each process; none: messages go over all devices


def send_beside(devices: Sequence[jax.Device]) -> None:
  """Lets messages go over devices that do not train; every process must call this.

  So they wait for no step. On CPUs they must not: a program of all devices after a step of some
  takes the threads that the step of another process waits for.

  Args:
    devices: One or more of each process, in the order of processes.
  """
  new = {d.process_index: d for d in reversed(devices)}.values()
  if jax.process_count() > 1 and {*new} != {*_beside}:
    meet()
    _beside[:] = new
    _gathering.cache_clear()
    meet()


def broadcast(message: bytes, source: int = 0) -> bytes:
  """Returns the message of process `source`; every process must call this."""
  if jax.process_count() == 1:
    return message
  is_source = jax.process_index() == source
  if _beside:
    length = int(gathered(np.array([len(message)], np.int32))()[source, 0])
    if not length:
      return b''
    mine = message if is_source else bytes(length)
    padded = np.frombuffer(mine.ljust(-(-length // 4) * 4, b'\0'), np.int32)
    return gathered(padded)()[source].tobytes()[:length]
  length = multihost_utils.broadcast_one_to_all(np.int32(len(message)), is_source)
  padded = np.frombuffer(message[: int(length)].ljust(int(length), b'\0'), np.uint8)
  return np.asarray(multihost_utils.broadcast_one_to_all(padded, is_source)).tobytes()


def meet() -> None:
  """Waits for all processes; every process must call this.

  On CPUs, gloo connects the processes when they first call a collective of some devices, and fails
  if one of them comes 30 s later than another. After that they may wait for any time. So processes
  meet here before they call new collectives after work that takes unlike times, and before such
  work, if they have not met yet.
  """
  gathered(np.zeros(1, np.int32))()


def gathered_in_turn(mine: np.ndarray) -> np.ndarray:
  """Returns the int32 arrays of all processes [P, …], after all steps of before.

  Every process must call this. Where devices are beside those that train, it waits for no step.
  """
  if _beside:
    return gathered(mine)()
  return np.asarray(multihost_utils.process_allgather(mine)).reshape(-1, *mine.shape)


def gathered(mine: np.ndarray) -> Callable[[], np.ndarray]:
  """Starts to gather arrays of all processes; returns a function that waits for them.

  Every process must call this, with an int32 array of one shape. The steps that the devices are
  computing are not waited for. The function that is returned may be called in another thread.

  Returns:
    A function that returns the arrays of all processes [P, …].
  """
  if jax.process_count() == 1:
    return lambda: mine[None]
  mesh, same = _gathering()
  sharded = NamedSharding(mesh, PartitionSpec('process'))
  found = same(jax.make_array_from_process_local_data(sharded, mine[None]))
  return lambda: np.asarray(found.addressable_data(0))


@functools.cache
def _gathering() -> tuple[Mesh, Callable[[jax.Array], jax.Array]]:
  """Returns a mesh with one device of each process, and a function that replicates its arrays."""
  first = {d.process_index: d for d in _beside or reversed(jax.devices())}
  devices = np.array([first[p] for p in range(jax.process_count())])
  mesh = Mesh(devices, ('process',), axis_types=(AxisType.Auto,))
  return mesh, jax.jit(lambda x: x + 0, out_shardings=NamedSharding(mesh, PartitionSpec()))


def as_process_0(compute: Callable[[], int], about: object) -> int:
  """Returns the result of process 0; every process must call this.

  Args:
    compute: Called in process 0 alone.
    about: What it is about, such as a folder, for the message of the other processes.

  Raises:
    UserError: `compute` has raised it. All processes raise it.
  """
  result, error = 0, None
  if jax.process_index() == 0:
    try:
      result = compute()
    except UserError as e:
      error = e
  if jax.process_count() > 1:
    mine = np.array([result, error is not None], np.int32)
    result, failed = map(int, multihost_utils.broadcast_one_to_all(mine))
    if failed and error is None:
      error = UserError(f'{about}: process 0 reports what is wrong with it')
  if error is not None:
    raise error
  return result


def say_once(text: str) -> None:
  """Prints a line on standard output in process 0."""
  if jax.process_index() == 0:
    say(text)
