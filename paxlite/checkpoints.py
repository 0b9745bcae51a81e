"""Checkpoints: Orbax behind one class, with checksums.

Orbax commits a step by renaming its folder, so a killed save leaves nothing that looks like a
checkpoint. It does not notice damaged bytes; therefore every file's size and CRC-32 go into
checksums.json before that rename, and restoring verifies them. A step that fails is moved aside
(nothing is deleted), reported, and the one before it is used.
"""

import concurrent.futures
import contextlib
import datetime
import json
import logging
import math
import os
import pathlib
import shutil
import time
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from paxlite.errors import TrainingError, UserError, listed
from paxlite.optimizers import path_name
from paxlite.save_errors import quieten, reason

_PREFIX = 'checkpoint'
CHECKSUMS = 'checksums.json'
_ITEMS = ('state', 'data')
_READERS = 8  # threads that read files to check them
_DESCRIPTION = 1 << 20  # bytes; files that say what is where are smaller

log = logging.getLogger('paxlite')


class Checkpoints:
  """The checkpoints of one run, in `directory`/checkpoint_%08d.

  Args:
    directory: Created on the first save.
    max_to_keep: Older steps are deleted, but for one every `keep_interval`.
    keep_interval: See max_to_keep.
    read_only: Nothing on disk is changed: another process may be writing there.
  """

  def __init__(
    self,
    directory: str | os.PathLike,
    max_to_keep: int = 10,
    keep_interval: datetime.timedelta = datetime.timedelta(hours=12),
    read_only: bool = False,
  ):
    self._directory = pathlib.Path(directory).absolute()
    self._max_to_keep = max_to_keep
    self._keep_interval = keep_interval
    self._manager_: Any = None
    self._read_only = read_only
    self._saving: int | None = None
    self._failure: str | None = None

  def steps(self) -> list[int]:
    """Committed steps on disk, ascending; verified or not."""
    found = self._directory.glob(f'{_PREFIX}_*') if self._directory.is_dir() else ()
    numbers = [p.name.removeprefix(f'{_PREFIX}_') for p in found]
    return sorted(int(n) for n in numbers if n.isdigit())

  def latest_good_step(self, below: float = math.inf) -> int | None:
    """The newest step whose files are as they were saved; damaged ones are moved aside."""
    step = self._verified_latest(below) if jax.process_index() == 0 else -1
    if jax.process_count() > 1:
      from jax.experimental import multihost_utils

      step = int(multihost_utils.broadcast_one_to_all(np.int32(step)))
    return None if step < 0 else step

  def restore_latest(self, restore: Callable[[int], Any]) -> tuple[int, Any] | None:
    """The newest good step and what `restore` makes of it; damaged ones are moved aside.

    Files are checked while they are restored, so that the disk reads them once. With several
    processes they are checked before, as all have to restore the same step.

    Raises:
      Exception: what `restore` raises for files that are as they were saved.
    """
    if jax.process_count() > 1:
      step = self.latest_good_step()
      return None if step is None else (step, restore(step))
    for step in reversed(self.steps()):
      # Orbax sees no files but those of the right names and sizes, with descriptions as saved
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
        return step, restored
      self._manager.reload()  # it would save no step up to the one that is moved aside
    return None

  def roll_back(self, before: int) -> int | None:
    """The newest good step below `before`, or None; those after it are moved aside."""
    self.close()
    found = self.latest_good_step(below=before)
    if found is not None and jax.process_index() == 0:
      for step in self.steps():
        if step > found:
          log.warning('checkpoint of step %d: moved to %s', step, self._aside(step, 'rolled_back'))
    if jax.process_count() > 1:
      from jax.experimental import multihost_utils

      multihost_utils.sync_global_devices('rolled back')
    return found

  def shapes(self, step: int) -> dict[str, str]:
    """The variables of a step by name, 'opt_state/1/count': 'int32[]'."""
    return shapes_of(self._manager.item_metadata(step)['state'].tree)

  def restore(self, step: int, abstract: Any, surplus: str = '') -> tuple[Any, dict[str, Any]]:
    """Restores a step.

    Args:
      step: One of `steps()`.
      abstract: A tree of jax.ShapeDtypeStruct with shardings; tells shapes, dtypes and layout.
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
    and this one is tried. A step that is there already is left as it is.
    """
    import orbax.checkpoint as ocp

    if step in self.steps():
      return
    self.wait()
    self._saving = step
    args = ocp.args.Composite(state=ocp.args.PyTreeSave(state), data=ocp.args.JsonSave(data))
    try:
      self._manager.save(step, args=args)
    except Exception as e:
      self._note_failure(e)

  def wait(self) -> None:
    """Waits until what was saved is on disk, or failed, which is logged."""
    if self._manager_ is None or self._saving is None:
      return
    try:
      self._manager_.wait_until_finished()
      self._failure = None if self._saving in self.steps() else self._failure
    except Exception as e:
      self._note_failure(e)
    self._saving = None

  def raise_failure(self) -> None:
    """Raises TrainingError when the last save failed: the run's end is not on disk."""
    if self._failure is not None:
      raise TrainingError(f'the last checkpoint was not written: {self._failure}')

  def close(self) -> None:
    """Waits for the last save; the object can be used again."""
    self.wait()
    if self._manager_ is not None:
      with contextlib.suppress(Exception):  # raises again what wait() has logged
        self._manager_.close()
      self._manager_ = None

  def _note_failure(self, error: Exception) -> None:
    """Logs a failed save; the next one has a new manager, since this one repeats its error."""
    self._failure = f'step {self._saving}: {reason(error, self._directory)}'
    log.error('saving failed, training goes on: %s', self._failure)
    manager, step = self._manager_, self._saving
    self._manager_, self._saving = None, None
    with contextlib.suppress(Exception):
      manager.close()
    if jax.process_index() == 0:
      for unfinished in self._unfinished(step):
        _remove(unfinished)

  def _unfinished(self, step: int | None) -> list[pathlib.Path]:
    """The folder of a step while it is being saved."""
    assert step is not None
    return list(self._directory.glob(f'{self.folder(step).name}.orbax-checkpoint-tmp*'))

  @property
  def _manager(self) -> Any:
    if self._manager_ is None:
      import orbax.checkpoint as ocp

      # Orbax logs dozens of lines a save, and hundreds where one fails, which we tell
      logging.getLogger('absl').setLevel(logging.CRITICAL)
      quieten()
      # weights do not compress, and without OCDBT a variable is a plain zarr folder
      handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False)
      self._manager_ = ocp.CheckpointManager(
        self._directory,
        item_names=_ITEMS,
        item_handlers={'state': handler, 'data': ocp.JsonCheckpointHandler()},
        options=ocp.CheckpointManagerOptions(
          max_to_keep=self._max_to_keep,
          keep_time_interval=self._keep_interval,
          step_name_format=ocp.path.step.standard_name_format(
            step_prefix=_PREFIX, step_format_fixed_length=8
          ),
          # what a failed save of this process left is removed already, see _note_failure
          cleanup_tmp_directories=not self._read_only and self._failure is None,
          async_options=ocp.AsyncOptions(post_finalization_callback=self._write_checksums),
        ),
      )
    return self._manager_

  def folder(self, step: int) -> pathlib.Path:
    """Of one step; there or not."""
    return self._directory / f'{_PREFIX}_{step:08d}'

  def _write_checksums(self) -> None:
    """Called by Orbax when every file of the step is written and its folder not yet renamed."""
    if jax.process_index() != 0:
      return
    (folder,) = self._unfinished(self._saving)
    write_checksums(folder)

  def _verified_latest(self, below: float) -> int:
    for step in reversed([s for s in self.steps() if s < below]):
      if self._is_good(step, damage(self.folder(step))):
        return step
    return -1

  def _is_good(self, step: int, problem: str | None) -> bool:
    """Whether a step has no problem; else tells of it, and moves the step aside."""
    if problem is None:
      return True
    moved = '' if self._read_only else f'; moved to {self._aside(step, "damaged")}'
    log.warning('checkpoint of step %d: %s%s', step, problem, moved)
    return False

  def _aside(self, step: int, why: str) -> pathlib.Path:
    """Renames a step so that it is none; returns its new name."""
    aside = _unused_name(self._directory / f'{why}_{self.folder(step).name}')
    return self.folder(step).rename(aside)

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


def _files(folder: pathlib.Path) -> list[str]:
  """The files of a step's items, and what says of which model imported weights are.

  Orbax writes its own notes beside them until the commit.
  """
  found = [p for item in _ITEMS for p in (folder / item).rglob('*') if p.is_file()]
  found += folder.glob('experiment.json')
  return sorted(p.relative_to(folder).as_posix() for p in found)


def _checksum(path: pathlib.Path) -> tuple[int, int]:
  size = crc = 0
  block = memoryview(bytearray(1 << 20))
  with path.open('rb', buffering=0) as f:
    while n := f.readinto(block):
      size += n
      crc = zlib.crc32(block[:n], crc)
  return size, crc


def _checksums(folder: pathlib.Path, names: Iterable[str]) -> dict[str, tuple[int, int]]:
  """Size and CRC-32 by name; disks read several files at a time faster than one."""
  names = list(names)
  with concurrent.futures.ThreadPoolExecutor(_READERS) as pool:
    return dict(zip(names, pool.map(lambda n: _checksum(folder / n), names), strict=True))


def write_checksums(folder: pathlib.Path) -> None:
  """Writes size and CRC-32 of every file of a complete step beside them."""
  (folder / CHECKSUMS).write_text(json.dumps(_checksums(folder, _files(folder))))


def damage(folder: pathlib.Path, up_to: float = math.inf) -> str | None:
  """What is wrong with a checkpoint's files, or None; of those above `up_to` bytes, their sizes."""
  try:
    found = json.loads((folder / CHECKSUMS).read_text())
    expected = {name: (int(size), int(crc)) for name, (size, crc) in found.items()}
  except FileNotFoundError:
    return f'{CHECKSUMS} is missing'
  except (ValueError, TypeError, AttributeError, OSError) as e:
    return f'{CHECKSUMS} cannot be read ({e})'
  present = set(_files(folder))
  for name in sorted(present ^ expected.keys()):
    return f'{name} is missing' if name in expected else f'{name} is not in {CHECKSUMS}'
  sizes = {name: (folder / name).stat().st_size for name in expected}
  actual = _checksums(folder, [name for name in expected if sizes[name] <= up_to])
  for name in expected:
    if sizes[name] != expected[name][0] or actual.get(name, expected[name]) != expected[name]:
      return f'{name} is damaged (size or CRC-32 differs)'
  return None


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
