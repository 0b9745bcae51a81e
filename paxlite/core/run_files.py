"""Writes files of a run into its folder, in which other users may be able to write too.

No file is written through a symbolic link at its path. Otherwise someone who can make a link there
could let the run overwrite another file of its user. Folders may be links: people keep checkpoints
on another disk.
"""

import errno
import os
import pathlib
import stat
from typing import IO, Literal, TextIO, overload


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

  Raises:
    OSError: The file cannot be opened, or `path` is not a regular file.
  """
  return open(path, mode, buffering, encoding, opener=_open)


def write_file(path: pathlib.Path, content: bytes) -> None:
  """Writes `content` to the file at `path`. A killed process leaves the old file or the new one.

  Raises:
    OSError: The file cannot be written.
  """
  unfinished = path.with_name(f'{path.name}.tmp')
  with open_file(unfinished, 'wb') as f:
    f.write(content)
  unfinished.replace(path)  # replaces a link at `path`, and leaves the link's target unchanged


def _open(path: str, flags: int) -> int:
  # opening a FIFO would wait for its other end; for regular files O_NONBLOCK means nothing
  descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
  if not stat.S_ISREG(os.fstat(descriptor).st_mode):
    os.close(descriptor)
    raise OSError(errno.EINVAL, 'it is not a file', path)
  return descriptor
