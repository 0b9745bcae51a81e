"""A lock that allows only one run at a time in a job_log_dir."""

import contextlib
import errno
import fcntl
import json
import logging
import os
import pathlib
import socket
import time
from typing import IO

from paxlite.core.errors import Interrupted, UserError
from paxlite.core.json_text import parsed
from paxlite.core.run_files import open_file

_FILE = '.lock'
_HELD = (errno.EACCES, errno.EAGAIN)
_WAIT_SECONDS = 120  # for a lock of the same job: a file system detects a lost node late

log = logging.getLogger('paxlite')


class FolderLock:
  """A lock on a folder that the kernel releases when the process ends, however it ends.

  It is a POSIX lock. Such a lock also works between hosts on NFS and Lustre, is not inherited by
  child processes and depends neither on clocks nor on host names. The file names the holder of the
  lock, but only for the error message.

  Args:
    folder: The run's job_log_dir.
  """

  def __init__(self, folder: pathlib.Path):
    self._path = folder / _FILE
    self._file: IO[str] | None = None

  def acquire(self) -> None:
    """Takes the lock; does nothing if this object holds it, or if the folder does not exist yet.

    Raises:
      UserError: Another run holds the lock, or the file cannot be opened.
      Interrupted: A process of the same Slurm job, on a node that Slurm has given up, still holds
        the lock after _WAIT_SECONDS.
    """
    if self._file is not None or not self._path.parent.is_dir():
      return
    try:
      file = open_file(self._path, 'a+')
    except OSError as e:
      raise UserError(f'--job_log_dir={self._path.parent} cannot be written: {e}') from None
    end = time.monotonic() + _WAIT_SECONDS
    while not self._locked(file):
      file.seek(0)
      owner, its_job = _described(file.read())
      where = f'--job_log_dir={self._path.parent}'
      same_job = its_job is not None and its_job == os.environ.get('SLURM_JOB_ID')
      if same_job and time.monotonic() < end:
        time.sleep(1)
      elif same_job:
        raise Interrupted(f'an earlier start of this job{owner} still has {where}')
      else:
        raise UserError(
          f'{where} is in use by another run{owner}. Wait for it or end it, or choose another '
          '--job_log_dir'
        )
    file.truncate(0)
    job = os.environ.get('SLURM_JOB_ID')
    holder = {'host': socket.gethostname(), 'process': os.getpid(), 'slurm_job': job}
    self._file = file
    with contextlib.suppress(OSError):  # A full disk is reported where a checkpoint is written.
      file.write(json.dumps(holder))
      file.flush()

  def _locked(self, file: IO[str]) -> bool:
    """Tries to take the lock; returns False if another process holds it.

    Returns True, with a warning, if the file system has no locks.
    """
    try:
      fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
      if e.errno in _HELD:
        return False
      log.warning('%s cannot be locked (%s): see to it that no second run is there', self._path, e)
    return True

  def release(self) -> None:
    """Releases the lock; does nothing if it is not held."""
    if self._file is not None:
      self._file.close()
      self._file = None


def _described(text: str) -> tuple[str, str | None]:
  """Returns a text that names the holder of a lock, for a message, and the holder's Slurm job."""
  try:
    owner = parsed(text)
    job = owner['slurm_job']
    of_job = f', Slurm job {job}' if job else ''
    return f' (process {owner["process"]} on {owner["host"]}{of_job})', job
  except (ValueError, KeyError, TypeError):  # The file is just being written.
    return '', None
