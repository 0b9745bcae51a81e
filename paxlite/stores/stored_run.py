"""A run with its job_log_dir in an object store and a local working folder.

The run reads and writes only that folder, as any other run does. A thread copies new files to the
store. So a store that is slow or absent stops no step. A run that was killed continues on the same
machine from its folder, whether it was copied or not, and on another machine from the store.
"""

import contextlib
import json
import logging
import pathlib
import threading
import time
from collections.abc import Callable

import jax
import numpy as np

from paxlite.checkpointing.saved_record import SavedRecord
from paxlite.cli.terminal import say, warn
from paxlite.core.errors import NO_SPACE, Interrupted, TrainingError, UserError
from paxlite.core.json_text import parsed
from paxlite.core.run_files import check_place, write_file
from paxlite.files.folder_lock import FolderLock
from paxlite.processes.hosts import Hosts, hosts_of
from paxlite.processes.process_messages import broadcast, gathered, meet
from paxlite.stores import lease
from paxlite.stores.failure_log import FailureLog
from paxlite.stores.mirror import Mirror
from paxlite.stores.object_store import ObjectStore
from paxlite.stores.step_copies import StepCopies

_METADATA = '.store.json'
_LOOK_SECONDS = 1.0  # the time between two looks for a new checkpoint
_MIRROR_SECONDS = 30.0  # the time between two copies of metrics, events and goodput
_PAUSE_SECONDS = 10.0  # the pause after a failure
_FINAL_SECONDS = 600.0  # the most time for the last copies at the end of a run
_FAILED_SECONDS = 30.0  # the same for a run that ends with an error
_BEST_STEPS = 4  # of a host: the best, and those that a killed run has not deleted
_PATIENCE = 20.0  # seconds for which a request of the thread is tried again

log = logging.getLogger('paxlite')


class StoredRun:
  """A context that holds a run's lease and copies its folder to the store.

  When it begins, the files of the run and its newest good checkpoint are copied to the folder. When
  it ends, everything is copied to the store; it is an error if that fails.

  Args:
    address: The job_log_dir.
    folder: The folder on this machine.
    max_to_keep: Number of checkpoints to keep.
  """

  def __init__(self, address: str, folder: pathlib.Path, max_to_keep: int, lock: FolderLock):
    self.hosts = Hosts()
    self._address = address
    self._folder = folder
    self._max_to_keep = max_to_keep
    self._lock = lock
    self._lease = lease.Lease(address, lease.leave)
    self._view: lease.LeaseView | None = None  # of the lease, in a process that does not hold it
    self._store = ObjectStore(address, _PATIENCE, guard=self._check_lease)
    self._mirror = Mirror(self._store, folder, lease.NAME)
    self._steps: list[StepCopies] = []
    self._stop = threading.Event()
    self._thread = threading.Thread(target=self._copy, name='store', daemon=True)
    self._failures = FailureLog(address)

  def __enter__(self) -> 'StoredRun':
    try:
      self._in_all_processes(self._take)
      attempt = broadcast(self._lease.attempt.encode()).decode()
      if jax.process_index() != 0:
        self._view = lease.LeaseView(self._address, attempt)
      self.hosts = hosts_of(self._folder)
      if self.hosts.count not in (1, jax.process_count()):
        raise UserError(
          f'some processes of the run in {self._address} share {self._folder}, and others do not: '
          'give each process its own --local_dir=FOLDER, or all of them one on a shared disk'
        )
      if self.hosts.count > 1:
        self._leave_parts_of_the_best()
      self._in_all_processes(self._get_checkpoint)
    except BaseException:
      self._lease.release()
      raise
    if self.hosts.leads:
      self._thread.start()
    return self

  def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
    problem = ''
    # All processes have these.
    together = kind is None or issubclass(kind, Interrupted | TrainingError)
    self._stop.set()
    if self.hosts.leads:
      self._thread.join()
      problem = self._finish(_FINAL_SECONDS if together else _FAILED_SECONDS)
    if together:
      problem = broadcast(problem.encode()).decode()
    if jax.process_index() == 0:
      self._lease.release()
    if problem and kind is None:
      raise TrainingError(problem)
    if problem and jax.process_index() == 0:
      warn(problem)

  def _check_lease(self) -> None:
    """Raises OSError unless this run holds its lease; the store calls it before each write."""
    (self._view or self._lease).check()

  def _in_all_processes(self, act: Callable[[], object]) -> None:
    """Calls `act` in every process; if it fails in one, all processes raise an error."""
    problem: Exception | None = None
    meet()
    try:
      act()
    except (UserError, Interrupted) as e:
      problem = e
    except OSError as e:
      if e.errno in NO_SPACE:
        problem = TrainingError(f'{e.filename or self._folder}: {e.strerror or e}')
      else:
        problem = UserError(f'{e.filename or self._address}: {e.strerror or e}')
    failed = gathered(np.array([problem is not None], np.int32))().ravel()
    if failed.any() and problem is None:
      problem = UserError(f'process {int(failed.argmax())} reports what is wrong')
    if problem is not None:
      raise problem

  def _take(self) -> None:
    """Acquires the lease in process 0 and makes the run's folder."""
    if jax.process_index() != 0:
      return
    self._folder.mkdir(parents=True, exist_ok=True)
    try:
      self._lock.acquire()
    except UserError as e:
      raise UserError(str(e).replace(str(self._folder), self._address)) from None
    self._store.check()
    known = _read_metadata(self._folder)
    last = self._lease.acquire(known)
    if last is not None and last == known:
      self._write_metadata()  # first: a start that fails after this is still of this machine
      self._mirror.download(resumes=True)
    else:
      self._mirror.download()
      # the metrics of the store are older than local states, which would continue after them
      (self._folder / 'local_states.json').unlink(missing_ok=True)
      SavedRecord(self._folder).remove()  # the store says what was saved
    for name in ('', 'best/'):
      copies = self._copies(name)
      copies.remove_unfinished()
      for step in copies.local() if last != known or last is None else ():
        if not copies.is_same(step):
          aside = copies.set_aside(step)
          log.warning('checkpoint of step %d is not in %s: moved to %s', step, self._address, aside)
    self._write_metadata()

  def _write_metadata(self) -> None:
    """Records that the folder belongs to this attempt to run."""
    metadata = {'address': self._address, 'attempt': self._lease.attempt}
    write_file(self._folder / _METADATA, json.dumps(metadata).encode())

  def _leave_parts_of_the_best(self) -> None:
    """Moves a best checkpoint aside that a host lacks; the others would wait for its part."""
    copies = self._copies('best/')
    steps = copies.local()
    own = np.full(_BEST_STEPS, -1, np.int32)
    own[: len(steps)] = steps[-_BEST_STEPS:]
    held = gathered(own)()
    for step in steps if self.hosts.leads else ():
      if not (held == step).any(1).all():
        copies.set_aside(step)

  def _get_checkpoint(self) -> None:
    """Gets the newest good checkpoint into the folder of each host."""
    if not self.hosts.leads:
      return
    copies = self._copies()
    if self.hosts.count > 1:  # What one host has on its disk is a part of a checkpoint only.
      for step in {*copies.local()} - {*copies.steps()}:
        copies.set_aside(step)
    good = copies.newest_good()
    if self.hosts.count > 1 and good is not None:  # All hosts must have the same steps.
      for step in copies.local():
        if step > good:
          copies.set_aside(step)
    # A checkpoint in the store comes with the metrics up to its step, so they are copied before it.
    self._steps = [copies, self._copies('best/', 1)]
    for each in self._steps:
      each.begin()

  def _copies(self, prefix: str = '', keep: int = 0) -> StepCopies:
    name, keep = f'{prefix}checkpoints', keep or self._max_to_keep
    upload = self._mirror.upload
    folder, known = self._folder / name, lease.NAME
    return StepCopies(self._store, name, folder, self.hosts, known, keep, upload)

  def _copy(self) -> None:
    """Copies what appears in the folder until the context ends."""
    mirrored_at = -float('inf')
    while not self._stop.wait(_LOOK_SECONDS):
      try:
        is_due = time.monotonic() > mirrored_at + _MIRROR_SECONDS
        self._look(mirrors=is_due)
        mirrored_at = time.monotonic() if is_due else mirrored_at
      except Exception as e:  # After any error the thread must try again.
        self._failures.failed(e)
        self._stop.wait(_PAUSE_SECONDS)
      else:
        self._failures.passed()

  def _look(self, mirrors: bool) -> None:
    """Copies what is new, and raises the first failure, which does not keep the rest waiting.

    Args:
      mirrors: Whether metrics and other files are copied as well.
    """
    check_place(self._folder)
    self._check_lease()  # The objects may be those of another run by now.
    failures: list[Exception] = []
    acts = [copies.look for copies in self._steps]
    for act in [*acts, self._mirror.upload] if mirrors and jax.process_index() == 0 else acts:
      try:
        act()
      except Exception as e:
        failures.append(e)
    if failures:
      raise failures[0]

  def _finish(self, seconds: float) -> str:
    """Copies what is left, within a time limit in seconds; returns what is wrong, or ''."""
    until = time.monotonic() + seconds
    pending = sum(len(copies.pending()) for copies in self._steps)
    if pending and jax.process_index() == 0:
      say(f'Copying {pending} checkpoints to {self._address}' if pending > 1 else
          f'Copying the last checkpoint to {self._address}')  # fmt: skip
    while True:
      reason = ''
      try:
        self._look(mirrors=True)
      except Exception as e:
        reason = self._failures.failed(e)
      left = [step for copies in self._steps for step in copies.pending()]
      if not reason and not left:
        return ''
      if time.monotonic() > until:
        what = f'the checkpoint of step {left[-1]}' if left else 'the last records'
        return (
          f'{self._address} lacks {what}{f" ({reason})" if reason else ""}: it is in '
          f'{self._folder}. Start the run again on this machine to copy it'
        )
      time.sleep(_LOOK_SECONDS)


def _read_metadata(folder: pathlib.Path) -> str | None:
  """Returns the last attempt that ran in a folder, or None."""
  with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
    return str(parsed((folder / _METADATA).read_text())['attempt'])
  return None
