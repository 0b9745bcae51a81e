"""One run at a time in a job_log_dir."""

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
from paxlite.core.run_files import open_file

_FILE = '.lock'
_HELD = (errno.EACCES, errno.EAGAIN)
_WAIT_SECONDS = 120  # for a lock of the same job: a file system knows late that a node is lost

log = logging.getLogger('paxlite')


class FolderLock:
  """A lock on a folder that the kernel releases when the process ends, however it ends.

  It is a POSIX lock, which also holds between hosts on NFS and Lustre, is not inherited by children
  and knows neither clocks nor host names. The file says who holds it, for the message alone.

  Args:
    folder: The run's job_log_dir.
  """

  def __init__(self, folder: pathlib.Path):
    self._path = folder / _FILE
    self._file: IO[str] | None = None

  def acquire(self) -> None:
    """Takes the lock; does nothing where it is held, or where the folder is not there yet.

    Raises:
      UserError: another process has it.
      Interrupted: it is one of the same Slurm job, on a node that Slurm has given up.
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
    with contextlib.suppress(OSError):  # a full disk is reported by what needs it
      file.write(json.dumps(holder))
      file.flush()

  def _locked(self, file: IO[str]) -> bool:
    """Whether the lock could be taken, or the file system has none."""
    try:
      fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
      if e.errno in _HELD:
        return False
      log.warning('%s cannot be locked (%s): see to it that no second run is there', self._path, e)
    return True

  def release(self) -> None:
    """Lets others in; does nothing where it is not held."""
    if self._file is not None:
      self._file.close()
      self._file = None


def _described(text: str) -> tuple[str, str | None]:
  """The holder of a lock, for a message, and its Slurm job."""
  try:
    owner = json.loads(text)
    job = owner['slurm_job']
    of_job = f', Slurm job {job}' if job else ''
    return f' (process {owner["process"]} on {owner["host"]}{of_job})', job
  except (ValueError, KeyError, TypeError, RecursionError):  # it is being written
    return '', None
