"""Saves the state of a run whose folder was moved, deleted or replaced while it trained."""

import os
import pathlib
import sys

import jax

from paxlite.checkpointing.checkpoints import Checkpoints
from paxlite.checkpointing.folders import unused_name
from paxlite.checkpointing.saved_record import SavedRecord
from paxlite.core.errors import TrainingError
from paxlite.core.json_text import JsonObject
from paxlite.core.run_files import MovedError, check_place
from paxlite.processes.process_messages import broadcast
from paxlite.training.state_store import StateStore
from paxlite.training.train_state import TrainState


def is_moved(folder: pathlib.Path) -> bool:
  """Returns whether the folder of a run of one process is not at its path any more.

  Several processes notice it when they save, which they do together.
  """
  return jax.process_count() == 1 and bool(_seen(folder)[0])


def _seen_by_first_process(folder: pathlib.Path) -> tuple[str, pathlib.Path]:
  """Returns what process 0 sees, which holds the lock; every process must call this."""
  how, place = _seen(folder)
  if jax.process_count() > 1:
    how, place = map(os.fsdecode, broadcast(os.fsencode(f'{how}\0{place}')).split(b'\0'))
  return how, pathlib.Path(place)


def _seen(folder: pathlib.Path) -> tuple[str, pathlib.Path | str]:
  """Returns what has happened to a folder, '' for nothing, and where its state can be saved."""
  try:
    check_place(folder / 'checkpoints')
  except MovedError as e:
    if e.now is not None and e.filename == str(folder):
      return str(e.strerror), e.now
    return str(e.strerror), unused_name(folder.with_name(f'{folder.name}.rescued'))
  return '', folder


def save_there(
  folder: pathlib.Path, store: StateStore, state: TrainState, step: int, metadata: JsonObject
) -> None:
  """Saves a state where the folder is now, if it is not at its path, and ends the run.

  A folder that was deleted gets a new one beside it. Several processes must call this together.

  Args:
    folder: The run's job_log_dir.
    store: The states of the run.
    state: The state after `step` steps.
    step: The step.
    metadata: The metadata of its checkpoint.

  Raises:
    TrainingError: The folder was moved, deleted or replaced.
  """
  how, place = _seen_by_first_process(folder)
  if not how:
    return
  where = 'nothing is saved'
  if store.writes:
    saved = Checkpoints(place / 'checkpoints', sys.maxsize, record=SavedRecord(place))
    store.save(state, step, metadata, saved)
    saved.close()
    saved.raise_failure()
    where = f'step {step:,} is saved in {place}: continue with --job_log_dir={place}'
  raise TrainingError(f'--job_log_dir={folder}: {how}; {where}')
