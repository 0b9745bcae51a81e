"""Folders that a command writes into an object store."""

import contextlib
import pathlib
import shutil
import tempfile
from collections.abc import Iterator

from paxlite.core.addresses import Address, is_address
from paxlite.core.errors import UserError
from paxlite.core.object_copies import reading, root
from paxlite.core.object_store import ObjectStore


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
  with reading(address):
    store = ObjectStore.opened(address)
    if next(iter(store.below(address.key)), None) is not None:
      raise UserError(f'{address} holds objects already: choose another name, or remove them')
  root().mkdir(parents=True, exist_ok=True)
  parent = pathlib.Path(tempfile.mkdtemp(prefix='output-', dir=root()))
  try:
    folder = parent / address.name
    yield folder
    files = [p.relative_to(folder) for p in sorted(folder.rglob('*')) if p.is_file()]
    for name in sorted(files, key=lambda name: name.as_posix() == last):
      try:
        store.upload(f'{address.key}/{name.as_posix()}', folder / name)
      except OSError as e:
        raise UserError(f'{address} cannot be written: {e.strerror or e}') from None
  finally:
    shutil.rmtree(parent, ignore_errors=True)
