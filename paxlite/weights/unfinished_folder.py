"""A folder that appears under its name when it is complete, or not at all."""

import contextlib
import fcntl
import os
import pathlib
import shutil
from collections.abc import Iterator

from paxlite.core.errors import UserError


@contextlib.contextmanager
def unfinished_folder(path: pathlib.Path) -> Iterator[pathlib.Path]:
  """A context that yields a folder of a temporary name, which is renamed to `path` at its end.

  A lock file keeps a second process from writing the same folder. The kernel releases the lock when
  a process ends. The folder that a killed process left is removed and made again. Raises UserError
  if the path exists, another process is writing it, or it cannot be made.

  Args:
    path: The final path, which must not exist.
  """
  final = path.absolute()
  folder, lock_path = (final.with_name(f'.{final.name}.{end}') for end in ('unfinished', 'lock'))
  _refuse_existing(final)
  with contextlib.ExitStack() as at_end:
    try:
      final.parent.mkdir(parents=True, exist_ok=True)
      at_end.callback(os.close, _locked(lock_path, final))
      _refuse_existing(final)  # the last owner of the lock may have made it
      shutil.rmtree(folder, ignore_errors=True)
      folder.mkdir()
    except OSError as e:
      raise UserError(f'{folder} cannot be written: {e.strerror or e}') from None
    # while the lock is held: later it may be another process's
    at_end.callback(lock_path.unlink, missing_ok=True)
    try:
      yield folder
    except BaseException:
      shutil.rmtree(folder, ignore_errors=True)
      raise
    folder.rename(final)


def _refuse_existing(path: pathlib.Path) -> None:
  if os.path.exists(path):
    raise UserError(f'{path} exists already: choose another folder, or remove it')


def _locked(path: pathlib.Path, of: pathlib.Path) -> int:
  """Returns the open lock file of a folder; UserError if another process has locked it."""
  while True:
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
      fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
      os.close(lock)
      raise UserError(
        f'{of} is being written by another process: wait for it, or choose another folder'
      ) from None
    with contextlib.suppress(FileNotFoundError):  # its last owner may have removed it
      if os.path.samestat(os.fstat(lock), path.stat()):
        return lock
    os.close(lock)
