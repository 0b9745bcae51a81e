"""Removes and renames folders of checkpoints."""

import os
import pathlib
import shutil
import time

from paxlite.core.errors import UserError


def refuse_dangling(folder: pathlib.Path, name: str = '') -> None:
  """Raises UserError if `folder` is a dangling link, for example to an unmounted disk.

  Args:
    name: What to call it in the message; '' means the path.
  """
  if folder.is_symlink() and not folder.exists():
    raise UserError(
      f'{name or folder} is a link to {os.readlink(folder)}, which does not exist: mount its '
      'disk, or remove the link'
    )


def remove(folder: pathlib.Path, patience: float = 5.0) -> None:
  """Removes a folder, repeatedly, since pending writes may add files for some seconds."""
  until = time.monotonic() + patience
  while folder.exists() and time.monotonic() < until:
    shutil.rmtree(folder, ignore_errors=True)
    time.sleep(0.05)
