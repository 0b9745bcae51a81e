"""The folder of a run: where it is on this machine, and whether it can be written."""

import pathlib
import re
import sys
import tempfile

from paxlite.core.errors import UserError
from paxlite.stores.addresses import Address, is_address
from paxlite.stores.runs.stored_run import twin


def located_run(place: str, local_dir: str | None) -> tuple[pathlib.Path, Address | None]:
  """Returns the folder on this machine of a job_log_dir, and its address in an object store.

  Args:
    place: The job_log_dir.
    local_dir: Where the folder of a run in an object store is; None: in the user's cache.

  Raises:
    UserError: Checkpoints cannot be written to a folder of that name.
  """
  if not is_address(place):
    folder = pathlib.Path(place).absolute()
    _check_name(folder, '--job_log_dir')
    return folder, None
  address = Address.parsed(place)
  folder = twin(address, local_dir)
  _check_name(folder, '--local_dir')
  return folder, address


def _check_name(folder: pathlib.Path, flag: str) -> None:
  """Raises UserError if TensorStore, which writes checkpoints, would write to another path."""
  text = str(folder)
  problem = ''
  if any('\ud800' <= c <= '\udfff' for c in text):  # bytes that Python could not decode
    encoding = sys.getfilesystemencoding()
    problem = f'it is not UTF-8, or Python reads it as {encoding} here (LC_ALL, PYTHONUTF8)'
  elif '\\' in text:
    problem = 'a backslash would be taken for a slash'
  elif address := re.search(r'/([a-z0-9]+:)/', f'{text}/'):
    problem = f'{address[1]} would be taken for the beginning of an address'
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
