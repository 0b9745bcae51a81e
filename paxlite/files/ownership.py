"""Checks who can change a file: programs are loaded only where no other user can have written."""

import os
import pathlib
import stat


def open_to_others(path: pathlib.Path) -> pathlib.Path | None:
  """Finds whether users other than this one and root can change `path` or a folder above it.

  In a sticky folder such as /tmp, other users can add files but cannot replace those of this user.
  Raises OSError if the permissions of one of them cannot be read.

  Args:
    path: An existing file or folder; links are followed.

  Returns:
    The first of them that other users can change; None where there is none.
  """
  path = path.resolve()
  for p in (path, *path.parents):
    status = p.stat()
    sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    if status.st_uid not in (0, os.geteuid()) or (status.st_mode & 0o022 and not sticky):
      return p
  return None
