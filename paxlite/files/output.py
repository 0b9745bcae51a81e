"""Files and folders that a command writes, on this machine or at an address."""

import contextlib
import hashlib
import pathlib
import shutil
import tempfile
from collections.abc import Iterator

from paxlite.core.errors import UserError
from paxlite.core.run_files import write_file
from paxlite.files.schemes import cache, is_address, scheme_of


def check_output(flag: str, place: str | None) -> None:
  """Checks that a file can be written; a folder that it needs is made. Hours of work may follow.

  Raises UserError if the file cannot be written.

  Args:
    flag: What named the file, such as --json.
    place: A path, an address, or None.
  """
  if place is None:
    return
  try:
    if is_address(place):
      scheme_of(place).check_writable(place)
      return
    path = pathlib.Path(place)
    if not path.name or path.is_dir():
      raise IsADirectoryError('it names a folder')
    if path.exists() and not path.is_file():
      return  # a device or a pipe, such as /dev/stdout
    path.parent.mkdir(parents=True, exist_ok=True)
    local_probe = path.with_name(f'.{path.name}.writable')
    local_probe.touch()
    local_probe.unlink()
  except OSError as e:
    raise UserError(f'{flag}={place} cannot be written: {e.strerror or e}') from None


def exists(place: str) -> bool:
  """Returns whether there is a file or folder at a path, or a file at or below an address.

  Raises UserError if the address cannot be read.
  """
  return scheme_of(place).exists(place) if is_address(place) else pathlib.Path(place).exists()


def write_output(place: str, content: bytes) -> None:
  """Writes a file, whole, to a path or an address; raises UserError if it cannot be written."""
  try:
    if is_address(place):
      scheme_of(place).write(place, content)
      return
    path = pathlib.Path(place)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():
      path.write_bytes(content)  # a device or a pipe must not be replaced by a file
    else:
      write_file(path, content)
  except OSError as e:
    raise UserError(f'{place} cannot be written: {e.strerror or e}') from None


@contextlib.contextmanager
def output_folder(place: str, last: str) -> Iterator[pathlib.Path]:
  """A context that yields the folder to make at `place`, a path or an address.

  For an address it is a folder on this machine, whose files are copied there at the end. Raises
  UserError if there is something at the address, or it cannot be written.

  Args:
    place: The folder, or the address, at which nothing may be yet.
    last: The file that is copied last, so that a reader who finds it finds all files.
  """
  if not is_address(place):
    yield pathlib.Path(place)
    return
  if exists(place):
    raise UserError(f'{place} holds objects already: choose another name, or remove them')
  cache().mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(prefix='output-', dir=cache(), ignore_cleanup_errors=True) as at:
    folder = pathlib.Path(at, place.rpartition('/')[2])
    yield folder
    scheme_of(place).upload(folder, place, last)


@contextlib.contextmanager
def resumed_folder(address: str, about: str, last: str) -> Iterator[pathlib.Path]:
  """A context that yields a folder on this machine, whose files are copied to `address` at the end.

  It is kept if the context or the copy fails, so that the same command continues with it. Raises
  UserError if the address cannot be written.

  Args:
    address: What the files are to be below.
    about: What is to be written: other contents are in other folders.
    last: The file that is copied last.
  """
  digest = hashlib.sha256(f'{address} {about}'.encode()).hexdigest()[:16]
  folder = cache() / 'unfinished' / digest
  folder.mkdir(parents=True, exist_ok=True)
  try:
    yield folder
    scheme_of(address).upload(folder, address, last)
  except BaseException:
    for path in (folder, folder.parent):
      with contextlib.suppress(OSError):  # It holds something.
        path.rmdir()
    raise
  shutil.rmtree(folder, ignore_errors=True)
