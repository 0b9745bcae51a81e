"""Checks who can change a file: programs are loaded only where the user alone can have written."""

import os
import pathlib
import stat


def open_to_others(path: pathlib.Path) -> pathlib.Path | None:
  """The file or folder, of `path` and all above it, that others than its user and root can change.

  Where a folder is sticky, as /tmp is, others can add files and not replace those of the user.

  Args:
    path: Exists; links are followed.

  Raises:
    OSError: one of them cannot be looked at.
  """
  path = path.resolve()
  for p in (path, *path.parents):
    status = p.stat()
    sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    if status.st_uid not in (0, os.geteuid()) or (status.st_mode & 0o022 and not sticky):
      return p
  return None
