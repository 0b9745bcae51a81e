"""Writes files of a run into its folder, in which other users may be able to write too.

No file is written through a symbolic link at its path. Otherwise someone who can make a link there
could let the run overwrite another file of its user. Folders may be links: people keep checkpoints
on another disk.

While a run uses its folder, somebody may move it, and start another run in its place. Then nothing
is written to the path any more, which is the folder of the other run. Records follow the folder.
"""

import errno
import pathlib
from collections.abc import Buffer, Callable
from typing import IO, Literal, TextIO, overload

from paxlite.core import regular_file
from paxlite.core.errors import naming


class MovedError(OSError):
  """The folder of a run is not at its path any more.

  Attributes:
    now: Where it is; None if it was deleted, or if that is not known.
  """

  def __init__(self, folder: pathlib.Path, now: pathlib.Path | None, how: str):
    super().__init__(errno.ESTALE, how, str(folder))
    self.now = now


_guards: dict[pathlib.Path, Callable[[], None]] = {}  # by folder: raises MovedError


def guard(folder: pathlib.Path, check: Callable[[], None]) -> None:
  """Lets `check` be called before anything is written below a folder."""
  _guards[folder] = check


def unguard(folder: pathlib.Path) -> None:
  """Ends what `guard` began; does nothing if it did not."""
  _guards.pop(folder, None)


def check_place(path: pathlib.Path) -> None:
  """Raises MovedError if `path` is in a run folder that no longer exists."""
  for folder, check in list(_guards.items()):  # another run may begin in another thread
    if path.is_relative_to(folder):
      check()


@overload
def open_file(
  path: pathlib.Path, mode: Literal['a', 'a+'], *, encoding: str | None = None
) -> TextIO: ...
@overload
def open_file(
  path: pathlib.Path, mode: Literal['ab', 'wb'], *, buffering: int = -1
) -> IO[bytes]: ...
def open_file(
  path: pathlib.Path, mode: str, *, buffering: int = -1, encoding: str | None = None
) -> TextIO | IO[bytes]:
  """Opens a file as open() does, but refuses a link, a FIFO or another special file at `path`.

  Raises OSError if the file cannot be opened, `path` is not a regular file, or the run's folder was
  deleted.
  """
  return open(_followed(path), mode, buffering, encoding, opener=regular_file.no_link)


def _followed(path: pathlib.Path) -> pathlib.Path:
  """Returns `path`, or the same path below where the folder of its run is now.

  Raises MovedError if the folder was deleted, or it is not known where it is.
  """
  try:
    check_place(path)
  except MovedError as e:
    if e.now is None or not path.is_relative_to(e.filename):
      raise
    return e.now / path.relative_to(e.filename)
  return path


def make_folder(path: pathlib.Path) -> None:
  """Makes a folder in a run folder, if it does not exist.

  Raises OSError if it cannot be made, or the run's folder was deleted.
  """
  _followed(path).mkdir(parents=True, exist_ok=True)


def write_file(path: pathlib.Path, *parts: Buffer) -> None:
  """Writes bytes to the file at `path`. A killed process leaves the old file or the new one.

  Raises OSError if the file cannot be written; the old one, if there is one, stays.

  Args:
    parts: What it holds, one after the other.
  """
  path = _followed(path)
  unfinished = path.with_name(f'{path.name}.tmp')
  with naming(path), open_file(unfinished, 'wb') as f:  # closing it may fail, too
    try:
      for part in parts:
        f.write(part)
      f.flush()
    except OSError:
      unfinished.unlink(missing_ok=True)  # it would fill the disk
      raise
  unfinished.replace(path)  # replaces a link at `path`, and leaves the link's target unchanged


def append_line(path: pathlib.Path, line: bytes) -> None:
  """Adds a line to the file at `path`; raises OSError, and adds no part of it, if that fails."""
  with open_file(path, 'ab', buffering=0) as f:
    end = f.tell()
    try:
      f.write(line + b'\n')
    except OSError:
      f.truncate(end)
      raise
