"""Checkpoints: Orbax behind one class, with checksums.

Orbax commits a step by renaming its folder, so a killed save leaves nothing that looks like a
checkpoint. It does not notice damaged bytes; therefore every file's size and CRC-32 go into
checksums.json before that rename, and restoring verifies them (checksums.py). Steps that fail are
reported, and moved aside (nothing is deleted) once a good one before them is found and used.
"""

import concurrent.futures
import contextlib
import logging
import math
import os
import pathlib
import shutil
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from paxlite.checkpointing import save_errors
from paxlite.checkpointing.checksums import (
  CHECKSUMS,
  ITEMS,
  PREFIX,
  damage,
  folder_name,
  step_of,
  unreadable,
  write_checksums,
)
from paxlite.core.errors import TrainingError, UserError, listed
from paxlite.core.variable_names import path_name

_DAMAGED = 'damaged'  # begins the new names of checkpoints that are
_DESCRIPTION = 1 << 20  # bytes; files that say what is where are smaller
_PAUSES = 0.5, 1.0, 2.0  # seconds before the last save is tried again

log = logging.getLogger('paxlite')


class Checkpoints:
  """The checkpoints of one run, in `directory`/checkpoint_%08d.

  Args:
    directory: Created on the first save.
    max_to_keep: Older steps are deleted.
    read_only: Nothing on disk is changed: another process may be writing there.
  """

  def __init__(
    self,
    directory: str | os.PathLike,
    max_to_keep: int = 10,
    read_only: bool = False,
  ):
    self._directory = pathlib.Path(directory).absolute()
    self._max_to_keep = max_to_keep
    self._manager_: Any = None
    self._read_only = read_only
    self._saving: int | None = None
    self._last: tuple[int, Any, dict[str, Any]] | None = None  # what save() was given
    self._failure: str | None = None
    self._callback_error: Exception | None = None

  def steps(self) -> list[int]:
    """Committed steps on disk, ascending; verified or not.

    Raises:
      UserError: the folder cannot be read.
    """
    return sorted(step for step in map(step_of, self._names()) if step is not None)

  def latest_good_step(self, below: float = math.inf) -> int | None:
    """The newest step below `below` whose files are as they were saved.

    Damaged ones after it are moved aside; where none is good, all stay where they are.

    Raises:
      UserError: a checkpoint cannot be read, which is no damage.
    """
    step = self._as_process_0(lambda: self._verified_latest(below))
    return None if step < 0 else step

  def restore_latest(self, restore: Callable[[int], Any]) -> tuple[int, Any] | None:
    """The newest good step and what `restore` makes of it; damaged ones are moved aside.

    Files are checked while they are restored, so that the disk reads them once. With several
    processes they are checked before, as all have to restore the same step. Where none is good, all
    stay where they are.

    Raises:
      UserError: a checkpoint cannot be read.
      Exception: what `restore` raises for files that are as they were saved.
    """
    if jax.process_count() > 1:
      step = self.latest_good_step()
      return None if step is None else (step, restore(step))
    for step in reversed(self.steps()):
      # Orbax reads no files but those of the right names and sizes, with descriptions as saved
      if not self._is_good(step, damage(self.folder(step), _DESCRIPTION)):
        continue
      with concurrent.futures.ThreadPoolExecutor(1) as pool:
        checking = pool.submit(damage, self.folder(step))
        restored = None
        try:
          restored = restore(step)
        except Exception:
          if checking.result() is None:
            raise
      if self._is_good(step, checking.result()):
        self._set_aside(after=step)
        return step, restored
    return None

  def start_over(self, accepted: bool) -> None:
    """Moves all steps aside, where none is good and the run begins again.

    Args:
      accepted: Whether somebody said that it may.

    Raises:
      UserError: it may not, and there are steps, or damaged ones that were moved aside.
    """
    self._as_process_0(lambda: self._start_over(accepted))

  def roll_back(self, before: int) -> int | None:
    """The newest good step below `before`, or None; those after it are moved aside."""
    self.close()
    found = self.latest_good_step(below=before)
    if found is not None:
      self._as_process_0(lambda: self._set_aside(found, 'rolled_back'))
    return found

  def shapes(self, step: int) -> dict[str, str]:
    """The variables of a step by name, 'opt_state/1/count': 'int32[]'."""
    return shapes_of(self._manager.item_metadata(step)['state'].tree)

  def restore(self, step: int, abstract: Any, surplus: str = '') -> tuple[Any, dict[str, Any]]:
    """Restores a step.

    Args:
      step: One of `steps()`.
      abstract: A tree of jax.ShapeDtypeStruct with shardings: shapes, dtypes and layout.
      surplus: The step may hold variables of names that begin so and `abstract` does not have.

    Returns:
      The tree, and the `data` dict that was saved with it.

    Raises:
      UserError: variables are missing, extra, or have another shape or dtype (they are named).
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

  def save(self, step: int, state: Any, data: dict[str, Any]) -> None:
    """Saves in the background; returns once the arrays may be overwritten.

    An earlier save that is still being written is waited for first; if it failed, that is logged
    and this one is tried. A step that exists already is not changed.
    """
    import orbax.checkpoint as ocp

    self.wait()
    self._saving = step
    self._last = step, state, data
    args = ocp.args.Composite(state=ocp.args.PyTreeSave(state), data=ocp.args.JsonSave(data))
    try:
      if step in self.steps():
        self._saving = self._failure = None
      else:
        self._manager.save(step, args=args)
    except Exception as e:
      self._note_failure(e)

  def wait(self) -> None:
    """Waits until what was saved is on disk, or failed, which is logged."""
    if self._manager_ is None or self._saving is None:
      return
    error: Exception | None = None
    try:
      self._manager_.wait_until_finished()
    except Exception as e:
      error = e
    error = self._agreed(error or self._callback_error)
    self._callback_error = None
    if error is not None:
      self._note_failure(error)
    elif self._saving in self.steps():
      self._failure = self._last = None
    self._saving = None

  def finish(self) -> None:
    """Waits for the last save; one that failed is tried again, if what it saved is still there.

    Several processes would have to agree on that, and do not try.
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
        log.warning('step %d was saved when it was tried again', step)

  def raise_failure(self) -> None:
    """Raises TrainingError when the last save failed: the run's end is not on disk."""
    if self._failure is not None:
      raise TrainingError(f'the last checkpoint was not written: {self._failure}')

  def close(self) -> None:
    """Finishes the last save; the object can be used again."""
    self.finish()
    self._last = None
    if self._manager_ is not None:
      with contextlib.suppress(Exception):  # raises again what wait() has logged
        self._manager_.close()
      self._manager_ = None

  @property
  def _can_be_saved_again(self) -> bool:
    """Whether the last save failed, and the memory of its arrays was given to no others."""
    if self._failure is None or self._last is None:
      return False
    arrays = [x for x in jax.tree.leaves(self._last[1]) if isinstance(x, jax.Array)]
    return not any(x.is_deleted() for x in arrays)

  def _note_failure(self, error: Exception) -> None:
    """Logs a failed save; the next one has a new manager, since this one repeats its error."""
    save_errors.note()
    before = self._failure
    self._failure = f'step {self._saving}: {save_errors.reason(error, self._directory)}'
    if self._failure != before:  # it is the same where a step is tried again
      log.error('saving failed, training continues: %s', self._failure)
    manager, step = self._manager_, self._saving
    self._manager_, self._saving = None, None
    with contextlib.suppress(Exception):
      manager.close()
    if jax.process_index() == 0:
      for unfinished in self._unfinished(step):
        _remove(unfinished)
      whole = self.folder(step) if step is not None else None
      if whole is not None and whole.exists() and not (whole / CHECKSUMS).exists():
        _remove(whole)  # it has no checksums, see _write_checksums

  def _agreed(self, error: Exception | None) -> Exception | None:
    """`error`, or that of another process, so that all processes do the same."""
    if jax.process_count() == 1:
      return error
    from jax.experimental import multihost_utils

    failed = np.asarray(multihost_utils.process_allgather(np.int32(error is not None)))
    if error is None and failed.any():
      error = OSError(f'process {int(failed.argmax())} could not write it, as it says')
    return error

  def _unfinished(self, step: int | None) -> list[pathlib.Path]:
    """The folder of a step while it is being saved."""
    assert step is not None
    return list(self._directory.glob(f'{self.folder(step).name}.orbax-checkpoint-tmp*'))

  @property
  def _manager(self) -> Any:
    if self._manager_ is None:
      import orbax.checkpoint as ocp

      # Orbax logs dozens of lines a save, and hundreds where one fails, which we log ourselves
      logging.getLogger('absl').setLevel(logging.CRITICAL)
      save_errors.quieten()
      # weights do not compress, and without OCDBT a variable is a plain zarr folder
      handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False)
      self._manager_ = ocp.CheckpointManager(
        self._directory,
        item_names=ITEMS,
        item_handlers={'state': handler, 'data': ocp.JsonCheckpointHandler()},
        options=ocp.CheckpointManagerOptions(
          max_to_keep=self._max_to_keep,
          step_name_format=ocp.path.step.standard_name_format(
            step_prefix=PREFIX, step_format_fixed_length=8
          ),
          # what a failed save of this process left is removed already, see _note_failure
          cleanup_tmp_directories=not self._read_only and self._failure is None,
          async_options=ocp.AsyncOptions(post_finalization_callback=self._write_checksums),
        ),
      )
    return self._manager_

  def folder(self, step: int) -> pathlib.Path:
    """The folder of a step, whether it exists or not."""
    return self._directory / folder_name(step)

  def _write_checksums(self) -> None:
    """Called by Orbax when every file of the step is written and its folder not yet renamed."""
    if jax.process_index() != 0:
      return
    (folder,) = self._unfinished(self._saving)
    try:
      write_checksums(folder)
    except Exception as e:
      if jax.process_count() == 1:
        raise  # so that the step is not committed
      self._callback_error = e  # the others wait for the commit; the step is removed after it

  def _names(self) -> list[str]:
    """The names in the directory."""
    try:
      return os.listdir(self._directory)
    except (FileNotFoundError, NotADirectoryError):
      return []
    except OSError as e:
      raise unreadable(self._directory, e) from None

  def _as_process_0(self, compute: Callable[[], int]) -> int:
    """The result of process 0 in all processes; they all raise UserError where it does."""
    result, error = 0, None
    if jax.process_index() == 0:
      try:
        result = compute()
      except UserError as e:
        error = e
    if jax.process_count() > 1:
      from jax.experimental import multihost_utils

      mine = np.array([result, error is not None], np.int32)
      result, failed = map(int, multihost_utils.broadcast_one_to_all(mine))
      if failed and error is None:
        error = UserError(f'{self._directory}: process 0 says what is wrong with it')
    if error is not None:
      raise error
    return result

  def _verified_latest(self, below: float) -> int:
    for step in reversed([s for s in self.steps() if s < below]):
      if self._is_good(step, damage(self.folder(step))):
        self._set_aside(after=step, below=below)
        return step
    return -1

  def _is_good(self, step: int, problem: str | None) -> bool:
    """Whether a step has no problem. A problem is logged."""
    if problem is not None:
      log.warning('checkpoint of step %d: %s', step, problem)
    return problem is None

  def _start_over(self, accepted: bool) -> int:
    damaged = [n for n in self._names() if n.startswith(f'{_DAMAGED}_{PREFIX}_')]
    left = damaged + [folder_name(step) for step in self.steps()]
    if left and not accepted:
      raise UserError(
        f'{self._directory} holds checkpoints, and none of them is good: {listed(left, shown=3)}. '
        'Put a good one back, choose another --job_log_dir, or begin again as a new run does, '
        'with what is there moved aside: --start_over'
      )
    if left:
      log.warning('no checkpoint is good: the run begins again, as --start_over says')
    return self._set_aside(after=-1)

  def _set_aside(self, after: int, why: str = _DAMAGED, below: float = math.inf) -> int:
    """Renames the steps between `after` and `below` so that they are none; returns how many."""
    steps = [] if self._read_only else [s for s in self.steps() if after < s < below]
    for step in steps:
      aside = _unused_name(self._directory / f'{why}_{folder_name(step)}')
      try:
        self.folder(step).rename(aside)
      except OSError as e:
        raise UserError(f'{self.folder(step)} cannot be moved aside: {e.strerror}') from None
      log.warning('checkpoint of step %d: moved to %s', step, aside)
    if steps and self._manager_ is not None:
      self._manager_.reload()  # it would save no step up to those that are gone
    return len(steps)

  def _check_structure(self, step: int, abstract: Any, surplus: str) -> None:
    found = self.shapes(step)
    if surplus:
      found = {name: shape for name, shape in found.items() if not name.startswith(surplus)}
    wanted = shapes_of(abstract)
    differences = [f'{n} is missing' for n in wanted.keys() - found.keys()]
    differences += [f'{n} is not in the model' for n in found.keys() - wanted.keys()]
    differences += [
      f'{n} is {found[n]} and the model has {wanted[n]}'
      for n in wanted.keys() & found.keys()
      if wanted[n] != found[n]
    ]
    if differences:
      raise UserError(
        f'{self.folder(step)} does not fit this experiment: {listed(differences)}. '
        f'Use the experiment that wrote it, or another --job_log_dir{conversion(differences)}'
      )


def conversion(differences: list[str]) -> str:
  """What to do about differences that are those of Transformer Engine's layers; or nothing."""
  if not any('/te/' in text for text in differences):
    return ''
  return '; between USE_TE=layer and others, python -m paxlite.tools.convert_te'


def shapes_of(tree: Any) -> dict[str, str]:
  """The leaves of a tree by name, as dtype and shape."""
  leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: hasattr(x, 'shape'))
  return {path_name(p): f'{np.dtype(x.dtype).name}{list(x.shape)}' for p, x in leaves}


def _unused_name(path: pathlib.Path) -> pathlib.Path:
  candidate, n = path, 1
  while candidate.exists():
    candidate, n = path.with_name(f'{path.name}.{n}'), n + 1
  return candidate


def _remove(folder: pathlib.Path, patience: float = 5.0) -> None:
  """Removes a folder to which writes that are still under way may add for some seconds."""
  until = time.monotonic() + patience
  while folder.exists() and time.monotonic() < until:
    shutil.rmtree(folder, ignore_errors=True)
    time.sleep(0.05)
