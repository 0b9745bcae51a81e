"""The folders of checkpoints: which steps there are, which are good, and which are moved aside."""

import logging
import math
import os
import pathlib

import jax

from paxlite.checkpointing.checksums import PREFIX, damage, folder_name, step_of, unreadable
from paxlite.checkpointing.folders import refuse_dangling
from paxlite.checkpointing.saved_record import SavedRecord
from paxlite.core.errors import UserError, listed
from paxlite.files.set_aside import unused_name
from paxlite.processes.process_messages import as_process_0

DAMAGED = 'damaged'  # prefix of the names of damaged checkpoints that were moved aside

log = logging.getLogger('paxlite')


class StepFolders:
  """The folders `directory`/checkpoint_%08d of one run.

  Args:
    directory: Folder of the checkpoints.
    read_only: If True, nothing on disk is changed, because another process may be writing there.
    own_disks: Whether each process has a disk of its own, and so a part of each checkpoint.
    record: Says outside of the directory that there are checkpoints; None: nothing does.
  """

  def __init__(
    self,
    directory: str | os.PathLike,
    read_only: bool = False,
    own_disks: bool = False,
    record: SavedRecord | None = None,
  ):
    self._directory = pathlib.Path(directory).absolute()
    self._read_only = read_only
    self._own_disks = own_disks
    self._record = record

  @property
  def of_run(self) -> pathlib.Path:
    """The folder of the run."""
    return self._directory.parent

  def steps(self) -> list[int]:
    """Returns the committed steps on disk in ascending order; they may be damaged.

    Raises UserError if the folder cannot be read.
    """
    return sorted(step for step in map(step_of, self._names()) if step is not None)

  def folder(self, step: int) -> pathlib.Path:
    """Returns the folder of a step, which may not exist."""
    return self._directory / folder_name(step)

  def latest_good_step(self, below: float = math.inf) -> int | None:
    """Returns the newest undamaged step below `below`, or None if there is no such step.

    Damaged steps after it are moved aside. If no step is good, none is moved. Raises UserError if a
    checkpoint cannot be read, which does not count as damage.
    """
    step = as_process_0(lambda: self._verified_latest(below), self._directory)
    if step < 0:
      return None
    if self._is_alone_with_disk:
      self._set_aside(after=step, below=below)
    return step

  def refuse_missing(self) -> None:
    """Raises UserError if the run has saved checkpoints, and they are gone."""
    if self._record is not None:
      self._record.refuse_missing(self._directory, self.steps())

  def start_over(self, accepted: bool) -> None:
    """Moves all steps aside; called if no step is good, before the run starts from the beginning.

    Raises UserError if the user did not allow it, and there are steps, or damaged ones that were
    moved aside before.

    Args:
      accepted: Whether the user allowed this with --start_over.
    """
    as_process_0(lambda: self._start_over(accepted), self._directory)
    if self._is_alone_with_disk:
      self._set_aside(after=-1)

  @property
  def _is_alone_with_disk(self) -> bool:
    """Whether what process 0 does to its files must be done here too."""
    return self._own_disks and jax.process_index() != 0

  def _names(self) -> list[str]:
    """Returns the names of the entries in the directory."""
    try:
      refuse_dangling(self._directory)
      return os.listdir(self._directory)
    except (FileNotFoundError, NotADirectoryError):
      return []
    except OSError as e:
      raise unreadable(self._directory, e) from None

  def _verified_latest(self, below: float) -> int:
    for step in reversed([s for s in self.steps() if s < below]):
      if self._is_good(step, damage(self.folder(step))):
        self._set_aside(after=step, below=below)
        return step
    return -1

  def _is_good(self, step: int, problem: str | None) -> bool:
    """Returns whether a step has no problem; a problem is logged."""
    if problem is not None:
      log.warning('checkpoint of step %d: %s', step, problem)
    return problem is None

  def _start_over(self, accepted: bool) -> int:
    damaged = [n for n in self._names() if n.startswith(f'{DAMAGED}_{PREFIX}_')]
    if (left := damaged + [folder_name(step) for step in self.steps()]) and not accepted:
      raise UserError(
        f'{self._directory} holds no good checkpoint: {listed(left, shown=3)}. Put a good one '
        'back, choose another folder, or move these aside and start over with --start_over'
      )
    if left:
      log.warning('no checkpoint is good: the run starts over, because of --start_over')
    if self._record is not None and not self._read_only:
      self._record.remove()
    return self._set_aside(after=-1)

  def _set_aside(self, after: int, why: str = DAMAGED, below: float = math.inf) -> int:
    """Renames the steps between `after` and `below`, so that they no longer count as steps.

    Returns the number of renamed steps.
    """
    steps = [] if self._read_only else [s for s in self.steps() if after < s < below]
    for step in steps:
      aside = unused_name(self._directory / f'{why}_{folder_name(step)}')
      try:
        self.folder(step).rename(aside)
      except OSError as e:
        raise UserError(f'{self.folder(step)} cannot be moved aside: {e.strerror}') from None
      log.warning('checkpoint of step %d: moved to %s', step, aside)
    return len(steps)
