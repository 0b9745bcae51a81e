"""Files and folders that a command writes, on this machine or into an object store."""

import contextlib
import hashlib
import pathlib
import shutil
import tempfile
from collections.abc import Iterator

from paxlite.core.errors import UserError
from paxlite.core.run_files import write_file
from paxlite.stores.addresses import Address, is_address
from paxlite.stores.object_copies import reading, root
from paxlite.stores.object_store import ObjectStore


def check_output(flag: str, place: str | None) -> None:
  """Checks that a file can be written; a folder that it needs is made. Hours of work may follow.

  Args:
    flag: What named the file, such as --json.
    place: A path, an address, or None.

  Raises:
    UserError: The file cannot be written.
  """
  if place is None:
    return
  try:
    if is_address(place):
      address = Address.parsed(place)
      store = ObjectStore.opened(address)
      store.check()
      probe = f'{address.key}.writable'
      store.write(probe, b'')
      store.delete([probe])
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
  """Returns whether there is a file or folder at a path, or an object at or below an address.

  Raises:
    UserError: The store cannot be used.
  """
  if not is_address(place):
    return pathlib.Path(place).exists()
  address = Address.parsed(place)
  with reading(address):
    store = ObjectStore.opened(address)
    with contextlib.suppress(FileNotFoundError):
      store.head(address.key)
      return True
    return next(iter(store.below(address.key)), None) is not None


def write_output(place: str, content: bytes) -> None:
  """Writes a file, whole, to a path or an address.

  Raises:
    UserError: It cannot be written.
  """
  try:
    if is_address(place):
      address = Address.parsed(place)
      ObjectStore.opened(address).write(address.key, content)
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

  For an address it is a folder on this machine, whose files are copied to the store at the end.

  Args:
    place: The folder, or the address, at which nothing may be yet.
    last: The file that is copied last, so that a reader who finds it finds all files.

  Raises:
    UserError: There is something at the address, or the store cannot be used.
  """
  if not is_address(place):
    yield pathlib.Path(place)
    return
  address = Address.parsed(place)
  if exists(place):
    raise UserError(f'{address} holds objects already: choose another name, or remove them')
  root().mkdir(parents=True, exist_ok=True)
  parent = pathlib.Path(tempfile.mkdtemp(prefix='output-', dir=root()))
  try:
    folder = parent / address.name
    yield folder
    _copy(folder, address, last)
  finally:
    shutil.rmtree(parent, ignore_errors=True)


@contextlib.contextmanager
def resumed_folder(address: Address, about: str, last: str) -> Iterator[pathlib.Path]:
  """A context that yields a folder on this machine, whose files are copied to `address` at the end.

  It is kept if the context or the copy fails, so that the same command continues with it.

  Args:
    address: The prefix of the objects to write.
    about: What is to be written: other contents are in other folders.
    last: The file that is copied last.

  Raises:
    UserError: The store cannot be used.
  """
  digest = hashlib.sha256(f'{address} {about}'.encode()).hexdigest()[:16]
  folder = root() / 'unfinished' / digest
  folder.mkdir(parents=True, exist_ok=True)
  try:
    yield folder
    _copy(folder, address, last)
  except BaseException:
    for path in (folder, folder.parent):
      with contextlib.suppress(OSError):  # It holds something.
        path.rmdir()
    raise
  shutil.rmtree(folder, ignore_errors=True)


def _copy(folder: pathlib.Path, address: Address, last: str) -> None:
  """Copies the files of a folder to the store, the last one last; hidden folders are left out."""
  store = ObjectStore.opened(address)
  files = [p.relative_to(folder) for p in sorted(folder.rglob('*')) if p.is_file()]
  files = [p for p in files if not any(part[0] == '.' for part in p.parts[:-1])]
  for name in sorted(files, key=lambda name: name.as_posix() == last):
    try:
      store.upload(f'{address.key}/{name.as_posix()}', folder / name)
    except OSError as e:
      raise UserError(
        f'{address} cannot be written: {e.strerror or e}; run the command again'
      ) from None
