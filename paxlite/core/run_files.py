"""Files that a run writes into its folder, which others may be able to write to as well.

None follows a symbolic link in its own place, or whoever can make a link there could have a file of
the run's user overwritten. Folders may be links: people keep checkpoints on another disk.
"""

import errno
import os
import pathlib
import stat
from typing import IO, Any


def open_file(path: pathlib.Path, mode: str, **options: Any) -> IO[Any]:
  """open(), but for a link or a FIFO at `path`.

  Raises:
    OSError: as open() does, and where `path` is something else than a file.
  """
  return open(path, mode, opener=_open, **options)


def write_file(path: pathlib.Path, content: bytes) -> None:
  """Makes `content` the file at `path`; a process that is killed leaves the old or the new one.

  Raises:
    OSError: it cannot be written.
  """
  unfinished = path.with_name(f'{path.name}.tmp')
  with open_file(unfinished, 'wb') as f:
    f.write(content)
  unfinished.replace(path)  # a link in its place is replaced, and what it points to is left alone


def _open(path: str, flags: int) -> int:
  # a FIFO in its place would be waited for; to other files O_NONBLOCK means nothing
  descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
  if not stat.S_ISREG(os.fstat(descriptor).st_mode):
    os.close(descriptor)
    raise OSError(errno.EINVAL, 'it is no file', path)
  return descriptor
