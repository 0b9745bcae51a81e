"""The folder of a run: where it is on this machine, and whether it can be written."""

import hashlib
import os
import pathlib
import re
import sys
import tempfile

from paxlite.core.errors import UserError
from paxlite.files.schemes import is_address, scheme_of


def located_run(place: str, local_dir: str | None) -> tuple[pathlib.Path, str | None]:
  """Returns the folder on this machine of a job_log_dir, and its address, if it has one.

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
