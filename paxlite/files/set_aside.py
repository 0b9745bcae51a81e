"""Moves files of a run aside, so that the run can continue without them."""

import itertools
import logging
import os
import pathlib

log = logging.getLogger('paxlite')


def set_aside(path: pathlib.Path, reason: str) -> None:
  """Renames a file or folder to a name that nobody reads, and logs it; nothing is deleted.

  Raises OSError if the file or folder cannot be renamed.
  """
  log.warning('%s is damaged (%s): moved to %s', path, reason, move_aside(path, 'damaged').name)


def move_aside(path: pathlib.Path, ending: str) -> pathlib.Path:
  """Renames a file or folder to NAME.ending, or NAME.ending.1 and so on; returns the new path."""
  return path.rename(unused_name(path.with_name(f'{path.name}.{ending}')))


def unused_name(path: pathlib.Path) -> pathlib.Path:
  """Returns `path`, with a number after it if there is something of that name."""
  numbered = (path.with_name(f'{path.name}.{n}') for n in itertools.count(1))
  return path if not os.path.lexists(path) else next(p for p in numbered if not os.path.lexists(p))
