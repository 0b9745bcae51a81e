"""A lock that allows only one run at a time in a job_log_dir."""

import contextlib
import errno
import fcntl
import json
import logging
import os
import pathlib
import socket
import threading
import time
from typing import IO

from paxlite.core import regular_file
from paxlite.core.errors import Interrupted, UserError
from paxlite.core.json_text import parsed
from paxlite.core.run_files import MovedError, guard, open_file, unguard

_FILE = '.lock'
_HELD = (errno.EACCES, errno.EAGAIN)
_WAIT_SECONDS = 120  # for a lock of the same job: a file system detects a lost node late

log = logging.getLogger('paxlite')


class FolderLock:
  """A lock on a folder that the kernel releases when the process ends, however it ends.

  It is a POSIX lock. Such a lock also works between hosts on NFS and Lustre, is not inherited by
  child processes and depends neither on clocks nor on host names. The file names the holder of the
  lock, but only for the error message.

  The lock is on a file, and the run uses a path. So the holder looks whether the path still leads
  to that file before it writes anything there.

  Args:
    folder: The run's job_log_dir.
  """

  def __init__(self, folder: pathlib.Path):
    self._folder = folder
    self._path = folder / _FILE
    self._file: IO[str] | None = None
    self._directory = -1
    self._of_checkpoints: FolderLock | None = None
    self._checking = threading.RLock()  # several threads write into the folder

  def acquire(self) -> None:
    """Acquires the lock; does nothing if this object holds it or the folder does not exist yet.

    Raises:
      UserError: Another run holds the lock, or the file cannot be opened.
      Interrupted: A process of the same Slurm job, on a node that Slurm has given up, still holds
        the lock after _WAIT_SECONDS.
    """
    if self._file is not None or not self._folder.is_dir():
      return
    end = time.monotonic() + _WAIT_SECONDS
    file = self._opened()
    while not self._locked(file):
      file.seek(0)
      owner, its_job = _described(file.read())
      where = f'--job_log_dir={self._folder}'
      same_job = its_job is not None and its_job == os.environ.get('SLURM_JOB_ID')
      if same_job and time.monotonic() < end:
        time.sleep(1)
      elif same_job:
        raise Interrupted(f'an earlier start of this job{owner} still has {where}')
      else:
        raise UserError(
          f'{where} is in use by another run{owner}. Wait for it or end it, or choose another '
          'folder'
        )
    if not _leads_to(self._path, file.fileno()):  # moved or deleted since it was opened
      file.close()
      return self.acquire()
    file.truncate(0)
    job = os.environ.get('SLURM_JOB_ID')
    holder = {'host': socket.gethostname(), 'process': os.getpid(), 'slurm_job': job}
    self._file = file
    with contextlib.suppress(OSError):  # A full disk is reported where a checkpoint is written.
      file.write(json.dumps(holder))
      file.flush()
    self._directory = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    guard(self._folder, self.check)
    if (self._folder / 'checkpoints').is_symlink():  # another folder may have the same link
      self._of_checkpoints = FolderLock(self._folder / 'checkpoints')
      try:
        self._of_checkpoints.acquire()
      except BaseException:
        self.release()
        raise

  def check(self) -> None:
    """Looks whether the folder is still at its path; does nothing if the lock is not held.

    A lock file that was deleted is made again. Raises MovedError if it is not, or another run has
    the lock.
    """
    with self._checking:
      if self._file is not None and not _leads_to(self._path, self._file.fileno()):
        self._file = self._made_again(self._file)

  def _made_again(self, former: IO[str]) -> IO[str]:
    """Returns the lock file in place of a deleted one; raises as `check` does."""
    if not _leads_to(self._folder, self._directory):
      now = _path_of(self._directory)
      how = f'it was moved to {now}' if now else 'it was deleted'
      raise MovedError(self._folder, now, f'{how} while the run used it')
    try:
      file = open(self._path, 'a+', opener=regular_file.no_link)  # noqa: SIM115
      is_free = self._locked(file)
    except OSError as e:
      raise MovedError(self._folder, None, f'its lock is gone: {e.strerror}') from None
    if not is_free:
      file.close()
      raise MovedError(self._folder, None, 'its lock was deleted, and another run has it')
    _close(former)
    return file

  def _opened(self) -> IO[str]:
    try:
      return open_file(self._path, 'a+')
    except OSError as e:
      raise UserError(f'--job_log_dir={self._folder} cannot be written: {e}') from None

  def _locked(self, file: IO[str]) -> bool:
    """Tries to take the lock; returns False if another process holds it.

    Returns True, with a warning, if the file system has no locks.
    """
    try:
      fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
      if e.errno in _HELD:
        return False
      log.warning('%s cannot be locked (%s): make sure that no second run uses it', self._path, e)
    return True

  def release(self) -> None:
    """Releases the lock; does nothing if it is not held."""
    if self._of_checkpoints is not None:
      self._of_checkpoints.release()
      self._of_checkpoints = None
    with self._checking:
      if self._file is not None:
        unguard(self._folder)
        _close(self._file)
        os.close(self._directory)
        self._file = None


def _close(file: IO[str]) -> None:
  """Closes a lock file, and drops the holder's name if a full disk has not taken it."""
  with contextlib.suppress(OSError):
    file.close()


def _leads_to(path: pathlib.Path, descriptor: int) -> bool:
  """Returns whether a path leads to an open file or folder.

  A file server that does not answer is no reason to believe that it does not.
  """
  try:
    return os.path.samestat(os.stat(path), os.fstat(descriptor))
  except OSError as e:
    return e.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


def _path_of(directory: int) -> pathlib.Path | None:
  """Returns where an open folder is now; None if it was deleted, or if the system does not tell."""
  with contextlib.suppress(OSError):
    path = pathlib.Path(os.readlink(f'/proc/self/fd/{directory}'))
    if os.path.samestat(os.stat(path), os.fstat(directory)):
      return path
  return None


def _described(text: str) -> tuple[str, str | None]:
  """Returns a text that names the holder of a lock, for a message, and the holder's Slurm job."""
  try:
    owner = parsed(text)
    job = owner['slurm_job']
    of_job = f', Slurm job {job}' if job else ''
    return f' (process {owner["process"]} on {owner["host"]}{of_job})', job
  except (ValueError, KeyError, TypeError):  # The file is just being written.
    return '', None
