"""A small file next to the checkpoints folder that records that a run saved checkpoints.

Without it a run whose checkpoints are gone looks like one that has not saved any yet: their folder
was deleted, or is on a disk that is not mounted. Such a run must not begin again at step 0.
"""

import json
import logging
import os
import pathlib
import time

from paxlite.core.errors import UserError
from paxlite.core.run_files import write_file
from paxlite.files.json_files import read_object

_NAME = '.saved.json'  # never uploaded: in a store, the list of checkpoints is the record
_OF_RUN = 'experiment.json'
_LOOK_SECONDS = 1.0  # between two looks at a folder, which may be on a file server

log = logging.getLogger('paxlite')


class SavedRecord:
  """The record of a run.

  Args:
    folder: The run's job_log_dir.
  """

  def __init__(self, folder: pathlib.Path):
    self._path = folder / _NAME
    self._newest: int | None = None  # the step that this process has noted
    self._looked_at = -float('inf')

  @property
  def exists(self) -> bool:
    return os.path.lexists(self._path)

  def is_due(self, saving: int | None) -> bool:
    """Returns whether it is time to look if the save of a step is complete; None: of no step."""
    if saving in (None, self._newest) or time.monotonic() < self._looked_at + _LOOK_SECONDS:
      return False
    self._looked_at = time.monotonic()
    return True

  def note(self, steps: list[int]) -> None:
    """Notes the newest of the complete checkpoints. A failure is left to the next save."""
    if not steps or self._newest == steps[-1]:
      return
    try:
      write_file(self._path, json.dumps({'step': steps[-1]}).encode())
      self._newest = steps[-1]
    except OSError as e:
      log.debug('%s cannot be written: %s', self._path, e)

  def remove(self) -> None:
    """Clears the record: no checkpoints exist from now on."""
    self._newest = None
    self._path.unlink(missing_ok=True)

  def refuse_missing(self, checkpoints: pathlib.Path, steps: list[int]) -> None:
    """Raises UserError if the run has saved checkpoints, and they are gone.

    A folder without experiment.json holds no run, so it is no error that checkpoints are missing.

    Args:
      steps: The steps that are there.
    """
    if steps or not (self._path.parent / _OF_RUN).exists() or not self.exists:
      return
    try:
      saved = read_object(self._path).get('step')
    except UserError:
      saved = None
    saved_step = f'the checkpoint of step {saved}' if isinstance(saved, int) else 'checkpoints'
    raise UserError(
      f'this run saved {saved_step}, but {checkpoints} holds no checkpoints: put them back or '
      'mount their disk, choose another folder, or start a new run with --start_over'
    )
