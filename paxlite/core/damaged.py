"""Files of a run that are not what it wrote, and that are no reason to stop it."""

import logging
import os
import pathlib

log = logging.getLogger('paxlite')


def set_aside(path: pathlib.Path, reason: str) -> None:
  """Renames a file or folder to a name that nobody reads, and says so; nothing is deleted.

  Raises:
    OSError: it cannot be renamed.
  """
  aside, n = path.with_name(f'{path.name}.damaged'), 1
  while os.path.lexists(aside):
    aside, n = path.with_name(f'{path.name}.damaged.{n}'), n + 1
  path.rename(aside)
  log.warning('%s is damaged (%s): moved to %s', path, reason, aside.name)
