"""The folder of a run: where it is on this machine, and whether a program may use it."""

import contextlib
import dataclasses
import hashlib
import os
import pathlib
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator

from paxlite.checkpointing.folders import refuse_dangling
from paxlite.config.experiment_file import EXPERIMENT
from paxlite.core.errors import UserError
from paxlite.data import tokenizer_copies
from paxlite.experiments.code_changes import changes, refuse_other_code
from paxlite.experiments.compatibility import check_function
from paxlite.experiments.identity import is_of, refuse_other_experiment, refuse_other_model
from paxlite.files.folder_lock import FolderLock
from paxlite.files.schemes import is_address, scheme_of
from paxlite.programs import kept_tokenizer
from paxlite.programs.run import Run
from paxlite.programs.run_checks import check_moments


def located_run(place: str, local_dir: str | None) -> tuple[pathlib.Path, str | None]:
  """Returns the folder on this machine of a job_log_dir, and its address, if it has one.

  Raises UserError if checkpoints cannot be written to a folder of that name.

  Args:
    place: The job_log_dir.
    local_dir: Where the folder of a run in an object store is; None: in the user's cache.
  """
  if not is_address(place):
    folder = pathlib.Path(place).absolute()
    _check_name(folder, '--job_log_dir')
    return folder, None
  address = scheme_of(place).checked(place)
  folder = twin(address, local_dir)
  _check_name(folder, '--local_dir')
  return folder, address


def twin(address: str, local_dir: str | None) -> pathlib.Path:
  """Returns the folder on this machine that belongs to an address.

  Args:
    address: A job_log_dir.
    local_dir: The folder in which it is; None: paxlite/runs in XDG_CACHE_HOME or ~/.cache.
  """
  cache = os.environ.get('XDG_CACHE_HOME') or '~/.cache'
  parent = pathlib.Path(local_dir or f'{cache}/paxlite/runs').expanduser().absolute()
  digest = hashlib.sha256(address.encode()).hexdigest()[:12]
  return parent / f'{address.rpartition("/")[2]}-{digest}'


def _check_name(folder: pathlib.Path, flag: str) -> None:
  """Raises UserError if TensorStore, which writes checkpoints, would write to another path."""
  text = str(folder)
  problem = ''
  if any('\ud800' <= c <= '\udfff' for c in text):  # bytes that Python could not decode
    encoding = sys.getfilesystemencoding()
    problem = f'its name is not UTF-8, or Python reads it as {encoding} here (LC_ALL, PYTHONUTF8)'
  elif '\\' in text:
    problem = 'a backslash would be taken for a slash'
  elif address := re.search(r'/([a-z0-9]+:)/', f'{text}/'):
    problem = f'paxlite would read {address[1]} as the beginning of an address'
  if problem:
    shown = text.encode('ascii', 'backslashreplace').decode() if problem[:2] == 'it' else text
    raise UserError(f'{flag}={shown}: checkpoints cannot be written there, {problem}: rename it')


def make_folder(folder: pathlib.Path) -> None:
  """Makes job_log_dir; raises UserError if it cannot be made or written."""
  try:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):  # has no name, so that processes do not collide
      pass
  except OSError as e:
    raise UserError(f'--job_log_dir={folder} cannot be written: {e.strerror or e}') from None


def check_folder(run: Run) -> None:
  """Raises UserError if the checkpoints are gone or belong to another experiment."""
  check_present(run)
  if not run.checkpoints().steps():
    return
  if not run.accept_changes:
    refuse_other_experiment(run.experiment, run.folder)
    refuse_other_code(run.experiment, run.folder)
    check_tokenizer(run)
  check_moments(run.experiment, run.folder)


def check_tokenizer(run: Run) -> None:
  """Raises UserError if a run would continue with other tokens than it was trained with."""
  path = kept_tokenizer.path_of(run.experiment)
  own = tokenizer_copies.kept(run.folder)
  if path and own is not None and tokenizer_copies.has_other_tokens(path, str(own)):
    raise UserError(
      f'{path} is not the tokenizer that {run.folder} was trained with: continue with its own '
      f'copy, {kept_tokenizer.NAME}={own}, or with the change, --accept_changes'
    )


def code_changes(run: Run) -> list[str]:
  """Texts on the code that has changed since the run's last start, as code_changes.changes."""
  return changes(run.experiment, run.folder) if run.checkpoints().steps() else []


def check_present(run: Run) -> None:
  """Raises UserError if the run has saved checkpoints and they are gone."""
  refuse_dangling(run.folder, f'--job_log_dir={run.folder}')
  if not run.start_over:
    run.checkpoints().refuse_missing()


def holds_weights(run: Run) -> bool:
  """Whether the folder holds imported weights, and no run."""
  return (run.folder / 'state').is_dir() and not run.checkpoints().steps()


def check_evaluated(run: Run) -> None:
  """Raises UserError if the folder's checkpoints belong to another experiment or model.

  Attributes that affect neither the model nor its backend may differ from those of training.
  """
  if not run.accept_changes and run.checkpoints().steps():
    check_model(run, also=run.experiment.plain_backend)
    if not is_of(run.experiment, run.folder):
      refuse_other_experiment(run.experiment, run.folder)


def check_model(run: Run, also: Iterable[str] = ()) -> None:
  """Raises UserError if the folder's checkpoints belong to another model.

  Args:
    also: Further attributes that must equal the run's, if the experiment has them.
  """
  refuse_other_model(run.experiment, run.folder, also)
  check_function(run.experiment, run.folder, run.folder / EXPERIMENT)


@contextlib.contextmanager
def holding(run: Run, deletes: bool = True) -> Iterator[tuple[Run, FolderLock]]:
  """A context in which a run may use its folder; yields the run and the folder's lock.

  A run in an object store has its lease, and its folder is copied to the store. Raises UserError if
  another run has it, or the store cannot be used.

  Args:
    deletes: Whether checkpoints in a store that are more than CHECKPOINT_MAX_TO_KEEP are deleted.
  """
  lock = FolderLock(run.folder)
  keep = run.experiment.CHECKPOINT_MAX_TO_KEEP if deletes else sys.maxsize
  try:
    if run.address is None:
      yield run, lock
    else:
      with scheme_of(run.address).holding(run.address, run.folder, keep, lock) as folders:
        yield dataclasses.replace(run, own_disks=folders > 1), lock
  finally:
    lock.release()  # the process of a notebook does not end here
