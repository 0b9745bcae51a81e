"""Keeps recent train states of a run on each host: a fast tier in addition to its checkpoints.

Each process writes one copy of each part that its own devices hold to a folder of its host. The
training loop waits only until the state is copied on the devices. If they have no room for a copy,
it waits until the state is copied to the memory of the host. A thread writes the copy. If the
thread has not finished when the next state is due, the loop waits for it, so that all processes
have states of the same steps.

On CPUs the loop waits until the thread has written the arrays themselves. A copy would take twice
the processor time of this. And if each process wrote beside its step, each would be late at another
moment, and all the others would wait for it in the collectives of the step.

A state counts when every process has written it, which happens before the next one is due. Until
then the one before it is the newest. So a killed run loses at most two intervals, and a run that
may lose N steps keeps a state every N / 2 steps.
"""

import concurrent.futures
import logging
import math
import pathlib
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from paxlite.checkpointing import save_errors
from paxlite.core.errors import UserError
from paxlite.core.json_text import JsonObject
from paxlite.core.trees import PyTree
from paxlite.core.variable_names import path_name
from paxlite.local_checkpoints import local_choice
from paxlite.local_checkpoints.branches import Branches
from paxlite.local_checkpoints.local_files import Bounds, Key, LocalFolder, Name
from paxlite.processes.process_messages import broadcast, gathered

log = logging.getLogger('paxlite')


class LocalCheckpoints:
  """The local states of a run, as one process sees them.

  Args:
    root: The folder of this host that holds the local states of all runs.
    run: The run's job_log_dir.
    lose: Number of steps that a killed run may lose.
    experiment: A number that identifies the experiment.
    accept_changes: Whether states of another experiment are used.
  """

  def __init__(
    self, root: str, run: pathlib.Path, lose: int, experiment: int, accept_changes: bool = False
  ):
    self._root = root or default_root()
    self._files = LocalFolder(self._root, run)
    self._run = run
    self._every = max(1, lose // 2)  # see the module's docstring
    self._experiment = experiment
    self._accept_changes = accept_changes
    self._branches = Branches()
    self._newest = -1  # the step of the newest complete state of this process
    self._began = -1  # the step from which the current branch continues
    self._reported = threading.Condition()
    self._reported_step = -1
    self._closing = False
    self._pool: concurrent.futures.ThreadPoolExecutor | None = None
    self._job: concurrent.futures.Future[None] | None = None
    self._failed = False
    self._copied = jax.jit(lambda arrays: [jnp.copy(x) for x in arrays])

  def restored(self, abstract: PyTree, above: int) -> tuple[int, PyTree, JsonObject] | None:
    """Returns the newest state that all processes can complete: its step, tree and metadata.

    Raises UserError if the folder for local states cannot be made, or has no room for two of them.

    Args:
      abstract: A tree of jax.ShapeDtypeStruct with the shapes, dtypes and shardings of a state.
      above: States up to this step are not used. That of process 0 counts.

    Returns:
      None if there is no such state.
    """
    self._files.make()
    self._check_room(abstract)
    self._branches = Branches.decoded(broadcast(Branches.read(self._run).encoded()))
    above = int(broadcast(str(above).encode()))
    held = [n for n in self._files.names() if self._branches.hold(n.branch, n.step)]
    experiment = None if self._accept_changes else self._experiment
    return local_choice.newest(
      self._files, [n for n in held if n.step > above], abstract, experiment
    )

  def _check_room(self, abstract: PyTree) -> None:
    sizes: dict[tuple[str, Bounds], int] = {}
    for path, x in jax.tree_util.tree_leaves_with_path(abstract):
      for index in x.sharding.addressable_devices_indices_map(x.shape).values():
        size = math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        sizes[path_name(path), local_choice.bounds_of(index, x.shape)] = size
    needed = 2 * sum(sizes.values())
    free = shutil.disk_usage(self._files.path).free + self._files.size()
    if needed > free:
      raise UserError(
        f'two local states of this process need {needed / 2**30:,.1f} GiB, but {self._root} has '
        f'room for {free / 2**30:,.1f}: name a folder on a local disk with LOCAL_CHECKPOINT_DIR'
      )

  def begin(self, step: int) -> None:
    """Begins a new branch of the run, which continues from `step`; other states are removed.

    Every process must call this before the first step, and after a rollback. Raises UserError if
    the folder for local states cannot be made.
    """
    self._finish()
    self._files.make()
    if self._pool is None:
      self._pool = concurrent.futures.ThreadPoolExecutor(1, 'local-states')
      self._files.remove_unfinished()
    is_kept = lambda n: n.step == step and self._branches.hold(n.branch, step)
    self._files.remove(is_kept)
    self._newest = step if any(map(is_kept, self._files.names())) else -1
    self._began, self._reported_step, self._closing = step, step, False
    branches = self._branches.begun(step)
    if jax.process_index() == 0:
      try:
        branches.write(self._run)
      except OSError as e:  # the states of this branch will not count
        log.error('%s, training continues without local states', save_errors.reason(e, self._run))
    self._branches = Branches.decoded(broadcast(branches.encoded()))

  def due(self, step: int) -> bool:
    """Returns whether the state after `step` is to be kept."""
    return step % self._every == 0

  def save(self, state: PyTree, step: int, metadata: Callable[[], JsonObject]) -> None:
    """Keeps a state; returns when its arrays may be overwritten.

    Args:
      state: A tree of arrays.
      metadata: Returns the metadata of a checkpoint; it is called in the thread that writes.
    """
    self._finish()
    copies = self._copies(state)
    newest = gathered(np.array([self._newest], np.int32))
    read = threading.Event()
    assert self._pool is not None
    self._job = self._pool.submit(self._write, step, copies, metadata, newest, read.set)
    if any(_is_on_cpu(x) for x in jax.tree.leaves(state)):
      read.wait()

  def reported(self, step: int) -> None:
    """Notes that the metrics of all steps up to `step` are written.

    A state is not complete before that, as a run that continues from it does not repeat the step.
    """
    with self._reported:
      self._reported_step = step
      self._reported.notify()

  def close(self, saved: int) -> None:
    """Finishes, and removes the states that are no newer than the checkpoint of step `saved`."""
    with self._reported:
      self._closing = True
      self._reported.notify()
    self._finish()
    if self._pool is not None:
      self._pool.shutdown()
      self._pool = None
    self._files.remove(lambda n: n.step > saved)
    self._files.remove_if_empty()

  def _finish(self) -> None:
    """Waits until the last state is written."""
    job, self._job = self._job, None
    if job is not None:
      job.result()

  def _write(
    self,
    step: int,
    copies: list[tuple[Key, jax.Array | np.ndarray]],
    metadata: Callable[[], JsonObject],
    newest: Callable[[], np.ndarray],
    read: Callable[[], None],
  ) -> None:
    """Writes a state, and calls `read` as soon as its arrays are no longer needed."""
    try:
      common = int(newest().min())  # all processes have the state of this step
      held = dict(metadata()) | {'experiment': self._experiment}
      name = Name(step, self._branches.current, jax.process_index())
      over = self._remove_old(common, name)
      commit = lambda: self._is_complete(step, read)
      try:
        if self._files.write(name, _on_host(copies), held, commit, over):
          self._newest, self._failed = step, False
      except OSError as e:
        if not self._failed:
          reason = save_errors.reason(e, self._files.path)
          log.error('local states cannot be written, training continues: %s', reason)
        self._failed = True
    finally:
      copies.clear()
      read()

  def _remove_old(self, common: int, name: Name) -> Name | None:
    """Removes the files that are no longer needed.

    Args:
      common: The step of the newest state that all processes have.
      name: The name of the file that is to be written.

    Returns:
      The name of an old file of this process, which is left to be written over; None if there is
      none.
    """
    # states between these two are left over if another process cannot write
    old = [n for n in self._files.names() if n.step not in (common, self._newest)]
    mine = [n for n in old if n.process == name.process]
    # the processes of an earlier branch may have had other numbers
    others = [n for n in old if n.branch != name.branch and common > self._began]
    over = mine.pop(0) if mine else None
    self._files.remove(lambda n: n == over or n not in mine + others)
    return over

  def _is_complete(self, step: int, read: Callable[[], None]) -> bool:
    """Calls `read`, and waits until the metrics of `step` are written.

    Returns:
      Whether they are; False if the run ends before that.
    """
    read()
    with self._reported:
      self._reported.wait_for(lambda: self._closing or self._reported_step >= step)
      return self._reported_step >= step

  def _copies(self, state: PyTree) -> list[tuple[Key, jax.Array | np.ndarray]]:
    """Returns one copy of each part of a state that this process holds; transfers have begun.

    On CPUs it returns the parts themselves.
    """
    parts: dict[Key, list[jax.Shard]] = {}
    for path, x in jax.tree_util.tree_leaves_with_path(state):
      for shard in x.addressable_shards:
        key = path_name(path), local_choice.bounds_of(shard.index, x.shape)
        parts.setdefault(key, []).append(shard)
    by_device: dict[jax.Device, list[tuple[Key, jax.Array]]] = {}
    sizes: dict[jax.Device, int] = {}
    for key, shards in parts.items():  # the device that copies the least so far copies this part
      shard = min(shards, key=lambda s: sizes.get(s.device, 0))
      by_device.setdefault(shard.device, []).append((key, shard.data))
      sizes[shard.device] = sizes.get(shard.device, 0) + shard.data.nbytes
    copies: list[tuple[Key, jax.Array | np.ndarray]] = []
    for device, found in by_device.items():
      keys, arrays = [key for key, _ in found], [x for _, x in found]
      if device.platform == 'cpu':
        copies += zip(keys, arrays, strict=True)
        continue
      copied = _has_room(device, sizes[device])
      if copied:
        arrays = self._copied(arrays)
      for x in arrays:
        x.copy_to_host_async()
      copies += zip(keys, arrays if copied else map(np.asarray, arrays), strict=True)
    return copies


def default_root() -> str:
  """Returns the folder of local states if none is named: the memory of the host, if it has one."""
  return '/dev/shm' if pathlib.Path('/dev/shm').is_dir() else tempfile.gettempdir()


def _has_room(device: jax.Device, size: int) -> bool:
  """Returns whether a device has room for a copy of `size` bytes and for what a step needs."""
  stats = device.memory_stats()
  if not stats or 'bytes_limit' not in stats:
    return True
  peak = stats.get('peak_bytes_in_use', stats.get('bytes_in_use', 0))
  return stats['bytes_limit'] - peak > 1.1 * size


def _on_host(copies: list[tuple[Key, jax.Array | np.ndarray]]) -> Iterator[tuple[Key, np.ndarray]]:
  """Yields arrays of the host, and frees those of the devices one by one."""
  copies.reverse()
  while copies:
    key, array = copies.pop()
    yield key, np.asarray(array)


def _is_on_cpu(x: jax.Array) -> bool:
  return any(shard.device.platform == 'cpu' for shard in x.addressable_shards)
