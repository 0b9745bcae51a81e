"""Sets damaged files of a run aside, so that the run can continue without them."""

import logging
import os
import pathlib

log = logging.getLogger('paxlite')


def set_aside(path: pathlib.Path, reason: str) -> None:
  """Renames a file or folder to a name that nobody reads, and logs it; nothing is deleted.

  Raises:
    OSError: The file or folder cannot be renamed.
  """
  aside, n = path.with_name(f'{path.name}.damaged'), 1
  while os.path.lexists(aside):
    aside, n = path.with_name(f'{path.name}.damaged.{n}'), n + 1
  path.rename(aside)
  log.warning('%s is damaged (%s): moved to %s', path, reason, aside.name)
