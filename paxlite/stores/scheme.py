"""The scheme of gs:// and s3:// paths, implemented by an object store."""

import contextlib
import pathlib
import re
from collections.abc import Iterator
from typing import IO

from paxlite.checkpointing.checksums import CHECKSUMS, folder_name, step_of
from paxlite.core.errors import AbsentError, UserError
from paxlite.files.folder_lock import FolderLock
from paxlite.files.schemes import SMALL, Scheme, place_of
from paxlite.stores import addresses
from paxlite.stores.object_blocks import ObjectBytes, ObjectRanges, open_object
from paxlite.stores.object_copies import copy_of
from paxlite.stores.object_store import ObjectStore
from paxlite.stores.store_errors import reading

_METADATA = 'data/metadata'
_OF_RUN = re.compile(r'(\w+://[^/]+(?:/.+)?)/checkpoints/[^/]+')


class Stores(Scheme):
  """Object stores: an address is an object, or a prefix, which is like a folder."""

  def checked(self, address: str) -> str:
    return addresses.checked(address)

  def open(self, address: str) -> IO[bytes]:
    return open_object(address)

  def names(self, address: str) -> list[str]:
    with reading(address):
      return [found.name for found in ObjectStore(address).below()]

  def content(self, address: str, kept: bool = True) -> ObjectRanges:
    return ObjectBytes(address) if kept else ObjectRanges(address)

  def exists(self, address: str) -> bool:
    with reading(address):
      store = ObjectStore(address)
      with contextlib.suppress(FileNotFoundError):
        store.head('')
        return True
      return next(store.below(), None) is not None

  def copy(self, address: str, largest: int | None = None, deep: bool = True) -> pathlib.Path:
    return copy_of(addresses.checked(address), largest, deep)

  def write(self, address: str, content: bytes) -> None:
    ObjectStore(address).write('', content)

  def check_writable(self, address: str) -> None:
    store = ObjectStore(f'{address}.writable')
    store.check()
    store.write('', b'')
    store.delete([''])

  def upload(self, folder: pathlib.Path, address: str, last: str) -> None:
    store = ObjectStore(address)
    files = [p.relative_to(folder) for p in sorted(folder.rglob('*')) if p.is_file()]
    files = [p for p in files if not any(part[0] == '.' for part in p.parts[:-1])]
    for name in sorted(files, key=lambda name: name.as_posix() == last):
      try:
        store.upload(name.as_posix(), folder / name)
      except OSError as e:
        raise UserError(
          f'{address} cannot be written: {e.strerror or e}; run the command again'
        ) from None

  def checkpoints(self, address: str) -> list[pathlib.Path]:
    from paxlite.stores.step_copies import StepCopies

    with reading(address):
      store = ObjectStore(address)
      store.check()
      folders = store.folders()
      name = 'checkpoints' if 'checkpoints' in folders else ''
      if name or any(step_of(folder) is not None for folder in folders):
        steps = reversed(StepCopies(store, name, place_of(address) / name).steps())
        found = [store.address(f'{name}/{folder_name(step)}'.lstrip('/')) for step in steps]
      else:
        found = [address] if 'state' in folders else []
    if not found:
      raise UserError(
        f'{address} holds no weights: neither checkpoints/ of a run nor state/ of imported ones'
      )
    for each in found:
      for name in (CHECKSUMS, _METADATA):
        with contextlib.suppress(AbsentError):  # Imported weights have no metadata.
          copy_of(f'{each}/{name}')
    run = _OF_RUN.fullmatch(found[0])
    with contextlib.suppress(AbsentError):
      copy_of(run[1] if run else found[0], largest=SMALL, deep=False)
    return [place_of(each) for each in found]

  @contextlib.contextmanager
  def holding(
    self, address: str, folder: pathlib.Path, max_to_keep: int, lock: FolderLock
  ) -> Iterator[int]:
    from paxlite.stores.stored_run import StoredRun

    with StoredRun(address, folder, max_to_keep, lock) as run:
      yield run.hosts.count


STORES = Stores()
