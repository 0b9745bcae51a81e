"""Removes and renames folders of checkpoints."""

import pathlib
import shutil
import time


def unused_name(path: pathlib.Path) -> pathlib.Path:
  """Returns `path`, with a number after it if there is something of that name."""
  candidate, n = path, 1
  while candidate.exists():
    candidate, n = path.with_name(f'{path.name}.{n}'), n + 1
  return candidate


def remove(folder: pathlib.Path, patience: float = 5.0) -> None:
  """Removes a folder, repeatedly, since pending writes may add files for some seconds."""
  until = time.monotonic() + patience
  while folder.exists() and time.monotonic() < until:
    shutil.rmtree(folder, ignore_errors=True)
    time.sleep(0.05)
