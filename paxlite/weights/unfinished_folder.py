"""A folder that appears under its name when it is complete, or not at all."""

import contextlib
import fcntl
import os
import pathlib
import shutil
from types import TracebackType

from paxlite.core.errors import UserError


class UnfinishedFolder:
  """Makes a folder under a temporary name, and renames it to `path` at the end of the context.

  A lock file keeps a second process from writing the same folder. The kernel releases the lock
  when a process ends. The folder that a killed process left is removed and made again.

  Args:
    path: The final path, which must not exist.

  Raises:
    UserError: The path exists, another process is writing it, or it cannot be made.
  """

  def __init__(self, path: pathlib.Path):
    self._final = path.absolute()
    self._refuse_existing()
    self.path = self._final.with_name(f'.{self._final.name}.unfinished')
    self._lock_path = self._final.with_name(f'.{self._final.name}.lock')
    self._lock = -1

  def __enter__(self) -> pathlib.Path:
    try:
      self._final.parent.mkdir(parents=True, exist_ok=True)
      self._take_lock()
      self._refuse_existing()  # the last owner of the lock may have made it
      shutil.rmtree(self.path, ignore_errors=True)
      self.path.mkdir()
    except OSError as e:
      self._release()
      raise UserError(f'{self.path} cannot be written: {e.strerror or e}') from None
    except UserError:
      self._release()
      raise
    return self.path

  def __exit__(
    self,
    kind: type[BaseException] | None,
    error: BaseException | None,
    traceback: TracebackType | None,
  ) -> None:
    try:
      if kind is None:
        self.path.rename(self._final)
      else:
        shutil.rmtree(self.path, ignore_errors=True)
    finally:
      self._release(remove=True)

  def _refuse_existing(self) -> None:
    if os.path.exists(self._final):
      raise UserError(f'{self._final} exists already: choose another folder, or remove it')

  def _take_lock(self) -> None:
    while True:
      flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
      self._lock = os.open(self._lock_path, flags, 0o666)
      try:
        fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except (BlockingIOError, PermissionError):
        raise UserError(
          f'{self._final} is being written by another process: wait for it, or choose another '
          'folder'
        ) from None
      with contextlib.suppress(FileNotFoundError):  # its last owner may have removed it
        if os.path.samestat(os.fstat(self._lock), self._lock_path.stat()):
          return
      os.close(self._lock)

  def _release(self, remove: bool = False) -> None:
    if self._lock < 0:
      return
    if remove:  # while the lock is held: later it may be another process's
      self._lock_path.unlink(missing_ok=True)
    os.close(self._lock)
    self._lock = -1
