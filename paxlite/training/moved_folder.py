"""Sees that the folder of a run was moved, deleted or replaced while it trained."""

import os
import pathlib

import jax

from paxlite.core.run_files import MovedError, check_place
from paxlite.files.set_aside import unused_name
from paxlite.processes.process_messages import broadcast


def is_moved(folder: pathlib.Path) -> bool:
  """Returns whether the folder of a run of one process is not at its path any more.

  Several processes notice it when they save, which they do together.
  """
  return jax.process_count() == 1 and bool(_seen(folder)[0])


def seen_by_first_process(folder: pathlib.Path) -> tuple[str, pathlib.Path]:
  """Returns what has happened to a folder, '' for nothing, and where its state can be saved.

  Process 0 sees it, which holds the lock of the folder. Every process must call this.
  """
  how, place = _seen(folder)
  if jax.process_count() > 1:
    how, place = map(os.fsdecode, broadcast(os.fsencode(f'{how}\0{place}')).split(b'\0'))
  return how, pathlib.Path(place)


def _seen(folder: pathlib.Path) -> tuple[str, pathlib.Path | str]:
  try:
    check_place(folder / 'checkpoints')
  except MovedError as e:
    if e.now is not None and e.filename == str(folder):
      return str(e.strerror), e.now
    return str(e.strerror), unused_name(folder.with_name(f'{folder.name}.rescued'))
  return '', folder
