"""Saves and restores checkpoints with Orbax, and protects them with checksums.

Orbax commits a step by renaming its folder, so a killed save leaves nothing that looks like a
checkpoint. Orbax does not detect damaged bytes. Therefore the size and CRC-32 of every file are
written to checksums.json before that rename, and verified on restore (checksums.py). A damaged step
is reported. It is moved aside (not deleted) when an earlier good step is found and used.
"""

import concurrent.futures
import contextlib
import logging
import math
import os
import pathlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import jax
import numpy as np

from paxlite.checkpointing import save_errors
from paxlite.checkpointing.checksums import (
  CHECKSUMS,
  ITEMS,
  PREFIX,
  check_metadata,
  damage,
  write_checksums,
)
from paxlite.checkpointing.folders import remove
from paxlite.checkpointing.save_barrier import SaveBarrier
from paxlite.checkpointing.saved_record import SavedRecord
from paxlite.checkpointing.step_folders import DAMAGED, StepFolders
from paxlite.checkpointing.structure import conversion_hint, differing, shapes_of
from paxlite.core.errors import TrainingError, UserError, listed
from paxlite.core.json_text import JsonObject
from paxlite.core.run_files import MovedError, check_place
from paxlite.core.trees import PyTree
from paxlite.processes.process_messages import as_process_0, gathered_in_turn

if TYPE_CHECKING:
  import orbax.checkpoint as ocp

_T = TypeVar('_T')
_DESCRIPTION = 1 << 20  # bytes; files that describe the arrays are smaller
_PAUSES = 0.5, 1.0, 2.0  # seconds before each new attempt of the last save

log = logging.getLogger('paxlite')


class Checkpoints(StepFolders):
  """The checkpoints of one run, in `directory`/checkpoint_%08d.

  Args:
    directory: Folder of the checkpoints; it is created on the first save.
    max_to_keep: Number of checkpoints to keep; older ones are deleted.
    read_only: If True, nothing on disk is changed, because another process may be writing there.
    own_disks: Whether each process has a disk of its own, and so a part of each checkpoint.
    record: Says outside of the directory that there are checkpoints; None: nothing does.
  """

  def __init__(
    self,
    directory: str | os.PathLike,
    max_to_keep: int = 10,
    read_only: bool = False,
    own_disks: bool = False,
    record: SavedRecord | None = None,
  ):
    super().__init__(directory, read_only, own_disks, record)
    self._max_to_keep = max_to_keep
    self._manager_: ocp.CheckpointManager | None = None
    self._saving: int | None = None
    self._last: tuple[int, PyTree, JsonObject] | None = None  # the arguments of the last save()
    self._failure: str | None = None
    self._callback_error: Exception | None = None
    self._barrier = SaveBarrier()

  def note_saved(self) -> None:
    """Notes the newest checkpoint in the run's record."""
    if self._record is not None and not self._read_only and jax.process_index() == 0:
      self._record.note(self.steps())

  def note_completed(self) -> None:
    """Notes the checkpoint that is being saved, if it is complete; to be called often."""
    if self._record is not None and self._record.is_due(self._saving):
      self.note_saved()

  def restore_latest(self, restore: Callable[[int], _T]) -> tuple[int, _T] | None:
    """Restores the newest good step and moves damaged ones after it aside.

    The files are checked while they are restored, so that the disk reads them only once. With
    several processes they are checked first, because all processes must restore the same step. If
    no step is good, none is moved.

    Args:
      restore: Function that restores a step.

    Returns:
      The step and the result of `restore`, or None if no step is good.

    Raises:
      UserError: A checkpoint cannot be read.
      Exception: Any error that `restore` raises for undamaged files.
    """
    if jax.process_count() > 1:
      step = self.latest_good_step()
      return None if step is None else (step, restore(step))
    for step in reversed(self.steps()):
      # This way Orbax reads only files with the right names and sizes, and undamaged descriptions.
      if not self._is_good(step, damage(self.folder(step), _DESCRIPTION)):
        continue
      with concurrent.futures.ThreadPoolExecutor(1) as pool:
        checking = pool.submit(damage, self.folder(step))
        restored: list[_T] = []  # empty if damaged files made it fail
        try:
          restored.append(restore(step))
        except Exception:
          if checking.result() is None:
            raise
      if self._is_good(step, checking.result()):
        self._set_aside(after=step)
        return step, restored[0]
    return None

  def roll_back(self, before: int) -> int | None:
    """Returns the newest good step below `before`, or None; later steps are moved aside."""
    self.close()
    found = self.latest_good_step(below=before)
    if found is not None:
      as_process_0(lambda: self._set_aside(found, 'rolled_back'), self._directory)
      if self._is_alone_with_disk:
        self._set_aside(found, 'rolled_back')
    return found

  def shapes(self, step: int) -> dict[str, str]:
    """Returns dtype and shape of a step's variables by name, 'opt_state/1/count': 'int32[]'."""
    return shapes_of(self._manager.item_metadata(step)['state'].tree)

  def restore(self, step: int, abstract: PyTree, surplus: str = '') -> tuple[PyTree, JsonObject]:
    """Restores a step.

    Raises UserError if variables are missing, extra, or have another shape or dtype (the message
    names them). float32 and bfloat16 are converted.

    Args:
      step: One of `steps()`.
      abstract: A tree of jax.ShapeDtypeStruct that gives the shapes, dtypes and shardings.
      surplus: Prefix of variable names that the step may hold although `abstract` lacks them.

    Returns:
      The restored tree, and the `data` dict that was saved with it.
    """
    import orbax.checkpoint as ocp

    self._check_structure(step, abstract, surplus)
    restored = self._manager.restore(
      step,
      args=ocp.args.Composite(
        state=ocp.args.PyTreeRestore(
          abstract,
          restore_args=ocp.checkpoint_utils.construct_restore_args(abstract),
          partial_restore=bool(surplus),
        ),
        data=ocp.args.JsonRestore(),
      ),
    )
    return restored['state'], restored['data']

  def save(self, step: int, state: PyTree, data: JsonObject) -> None:
    """Saves a step in the background; returns when the arrays may be overwritten.

    It first waits for an earlier save that is still being written. If that one failed, this is
    logged, and the new save is tried. A step that exists already is not overwritten.
    """
    import orbax.checkpoint as ocp

    self.wait()
    self._saving = step
    self._barrier.begin()
    self._last = step, state, data
    args = ocp.args.Composite(state=ocp.args.PyTreeSave(state), data=ocp.args.JsonSave(data))
    try:
      check_place(self._directory)
      if step in self.steps():
        self._saving = self._failure = None
      elif not self._manager.save(step, args=args, force=True):  # other folders may look newer
        raise OSError(f'Orbax has left out step {step}')
    except Exception as e:
      self._note_failure(e)

  def wait(self) -> None:
    """Waits until the last save is on disk or has failed; a failure is logged."""
    if self._manager_ is None or self._saving is None:
      return
    error: Exception | None = None
    try:
      self._manager_.wait_until_finished()
    except Exception as e:
      error = e
      self._barrier.fail()
    error = self._agreed(error or self._callback_error)
    self._callback_error = None
    if error is not None:
      with contextlib.suppress(OSError):  # of the disk on which the save has failed
        self._note_failure(error)
      # process 0 may remove files for longer than the others wait for it when they end
      self._agreed(None)
    elif self._saving in self.steps():
      self._failure = self._last = None
      self.note_saved()
    self._saving = None

  def finish(self) -> None:
    """Waits for the last save; a failed one is tried again if its arrays still exist.

    With several processes it is not tried again, because all would have to agree on that.
    """
    self.wait()
    pauses = iter(_PAUSES if jax.process_count() == 1 else ())
    while self._last is not None and self._can_be_saved_again:
      seconds = next(pauses, None)
      if seconds is None:
        break
      time.sleep(seconds)
      step, state, data = self._last
      self.save(step, state, data)
      self.wait()
      if self._failure is None:
        log.warning('step %d was saved at the second attempt', step)

  def raise_failure(self) -> None:
    """Raises TrainingError if the last save failed: the final state is not on disk."""
    if self._failure is not None:
      raise TrainingError(f'the last checkpoint was not saved: {self._failure}')

  def close(self) -> None:
    """Finishes the last save; the object can be used again afterwards."""
    self.finish()
    self._last = None
    if self._manager_ is not None:
      with contextlib.suppress(Exception):  # This raises the error that wait() has logged.
        self._manager_.close()
      self._manager_ = None

  @property
  def _can_be_saved_again(self) -> bool:
    """Whether the last save failed, and its arrays were not deleted or donated since."""
    if self._failure is None or self._last is None:
      return False
    arrays = [x for x in jax.tree.leaves(self._last[1]) if isinstance(x, jax.Array)]
    return not any(x.is_deleted() for x in arrays)

  def _note_failure(self, error: Exception) -> None:
    """Logs a failed save; the next save gets a new manager, as the old one repeats its error."""
    save_errors.note()
    before = self._failure
    self._failure = f'step {self._saving}: {save_errors.reason(error, self._directory)}'
    if self._failure != before:  # It is equal when the same step is tried again.
      log.error('saving failed, training continues: %s', self._failure)
    manager, step = self._manager_, self._saving
    self._manager_, self._saving = None, None
    if manager is not None:
      with contextlib.suppress(Exception):
        manager.close()
    if (jax.process_index() == 0 or self._own_disks) and not isinstance(error, MovedError):
      for unfinished in self._unfinished(step):
        remove(unfinished)
      whole = self.folder(step) if step is not None else None
      if whole is not None and whole.exists() and not (whole / CHECKSUMS).exists():
        remove(whole)  # A step without checksums is incomplete, see _write_checksums.

  def _agreed(self, error: Exception | None) -> Exception | None:
    """Returns `error`, or one for a failure of another process, so that all processes agree."""
    if jax.process_count() == 1:
      return error
    failed = gathered_in_turn(np.array([error is not None], np.int32)).ravel()
    if error is None and failed.any():
      error = OSError(f'process {int(failed.argmax())} could not write it, as it says')
    return error

  def _unfinished(self, step: int | None) -> list[pathlib.Path]:
    """Returns the temporary folders of a step that is being saved."""
    assert step is not None
    return list(self._directory.glob(f'{self.folder(step).name}.orbax-checkpoint-tmp*'))

  @property
  def _manager(self) -> 'ocp.CheckpointManager':
    if self._manager_ is None:
      if self._directory.is_dir():
        check_metadata(self._directory)
      self._manager_ = self._new_manager()
    return self._manager_

  def _new_manager(self) -> 'ocp.CheckpointManager':
    import orbax.checkpoint as ocp

    # Orbax logs dozens of lines per save, and hundreds for a failed one, which we log ourselves.
    logging.getLogger('absl').setLevel(logging.CRITICAL)
    save_errors.quieten()
    processes = ocp.options.MultiprocessingOptions(primary_host=None if self._own_disks else 0)
    # Weights do not compress, and without OCDBT a variable is a plain zarr folder.
    state = ocp.PyTreeCheckpointHandler(
      use_ocdbt=False, use_compression=False, multiprocessing_options=processes
    )
    data = ocp.JsonCheckpointHandler(multiprocessing_options=processes)
    return ocp.CheckpointManager(
      self._directory,
      item_names=ITEMS,
      item_handlers={'state': state, 'data': data},
      options=ocp.CheckpointManagerOptions(
        max_to_keep=self._max_to_keep,
        step_name_format=ocp.path.step.standard_name_format(
          step_prefix=PREFIX, step_format_fixed_length=8
        ),
        # The files of a failed save of this process are removed already, see _note_failure.
        cleanup_tmp_directories=not self._read_only and self._failure is None,
        multiprocessing_options=processes,
        async_options=ocp.AsyncOptions(
          post_finalization_callback=self._write_checksums,
          barrier_sync_fn=self._barrier,
          # Otherwise a process writes as soon as any process has made its folders, not only itself.
          create_directories_asynchronously=not self._own_disks,
        ),
      ),
    )

  def _write_checksums(self) -> None:
    """Called by Orbax when all files of a step are written, before its folder is renamed."""
    if jax.process_index() != 0 and not self._own_disks:
      return
    try:
      check_place(self._directory)  # the rename that follows must not be in another run's folder
      (folder,) = self._unfinished(self._saving)
      write_checksums(folder)
    except Exception as e:
      if jax.process_count() == 1:
        raise  # Then the step is not committed.
      self._callback_error = e  # The others wait for the commit; wait() removes the step after it.

  def _set_aside(self, after: int, why: str = DAMAGED, below: float = math.inf) -> int:
    count = super()._set_aside(after, why, below)
    if count and self._manager_ is not None:
      self._manager_.reload()  # Otherwise it would refuse to save steps up to the removed ones.
    return count

  def _check_structure(self, step: int, abstract: PyTree, surplus: str) -> None:
    found = self.shapes(step)
    if surplus:
      found = {name: shape for name, shape in found.items() if not name.startswith(surplus)}
    differences = differing(found, shapes_of(abstract))
    if differences:
      raise UserError(
        f'{self.folder(step)} does not fit this experiment: {listed(differences)}. '
        f'Use the experiment that wrote it, or another folder{conversion_hint(differences)}'
      )
