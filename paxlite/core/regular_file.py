"""Opens regular files alone: a FIFO would wait for its other end, and a device may never end."""

import errno
import os
import stat


def opener(path: str, flags: int) -> int:
  """An opener for open(), which refuses what is not a regular file. A link is followed.

  Raises OSError if it cannot be opened, or is not a regular file.
  """
  # for regular files O_NONBLOCK means nothing
  descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)
  if not stat.S_ISREG(os.fstat(descriptor).st_mode):
    os.close(descriptor)
    raise OSError(errno.EINVAL, 'it is not a file', path)
  return descriptor


def no_link(path: str, flags: int) -> int:
  """The same, which refuses a symbolic link at the path too."""
  return opener(path, flags | os.O_NOFOLLOW)
