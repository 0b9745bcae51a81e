"""The paths of gs:// and s3://: what the core asks of a scheme, done by an object store."""

import contextlib
import pathlib
from collections.abc import Iterator
from typing import IO

from paxlite.checkpointing.checksums import CHECKSUMS, folder_name, step_of
from paxlite.core.errors import AbsentError, UserError
from paxlite.files.folder_lock import FolderLock
from paxlite.files.schemes import SMALL, Scheme, place_of
from paxlite.stores.addresses import Address
from paxlite.stores.object_blocks import ObjectBytes, open_object
from paxlite.stores.object_copies import copy_of, reading
from paxlite.stores.object_store import ObjectStore
from paxlite.stores.stored_tensors import StoredTensors

_METADATA = 'data/metadata'


class Stores(Scheme):
  """Object stores: an address is an object, or a prefix, which is like a folder."""

  def checked(self, address: str) -> str:
    return str(Address.parsed(address))

  def open(self, address: str) -> IO[bytes]:
    return open_object(Address.parsed(address))

  def names(self, address: str) -> list[str]:
    place = Address.parsed(address)
    with reading(place):
      found = [o.key for o in ObjectStore.opened(place).below(place.key)]
    return [key.removeprefix(f'{place.key}/') for key in found]

  def content(self, address: str) -> ObjectBytes:
    return ObjectBytes(Address.parsed(address))

  def exists(self, address: str) -> bool:
    place = Address.parsed(address)
    with reading(place):
      store = ObjectStore.opened(place)
      with contextlib.suppress(FileNotFoundError):
        store.head(place.key)
        return True
      return next(iter(store.below(place.key)), None) is not None

  def copy(self, address: str, largest: int | None = None, deep: bool = True) -> pathlib.Path:
    return copy_of(Address.parsed(address), largest, deep)

  def write(self, address: str, content: bytes) -> None:
    place = Address.parsed(address)
    ObjectStore.opened(place).write(place.key, content)

  def check_writable(self, address: str) -> None:
    place = Address.parsed(address)
    store = ObjectStore.opened(place)
    store.check()
    probe = f'{place.key}.writable'
    store.write(probe, b'')
    store.delete([probe])

  def upload(self, folder: pathlib.Path, address: str, last: str) -> None:
    place = Address.parsed(address)
    store = ObjectStore.opened(place)
    files = [p.relative_to(folder) for p in sorted(folder.rglob('*')) if p.is_file()]
    files = [p for p in files if not any(part[0] == '.' for part in p.parts[:-1])]
    for name in sorted(files, key=lambda name: name.as_posix() == last):
      try:
        store.upload((place / name.as_posix()).key, folder / name)
      except OSError as e:
        raise UserError(
          f'{address} cannot be written: {e.strerror or e}; run the command again'
        ) from None

  def tensors(self, address: str) -> StoredTensors:
    return StoredTensors(Address.parsed(address))

  def checkpoints(self, address: str) -> list[pathlib.Path]:
    from paxlite.stores.step_copies import StepCopies

    place = Address.parsed(address)
    with reading(place):
      store = ObjectStore.opened(place)
      store.check()
      folders, _ = store.names(place.key)
      if 'checkpoints' in folders or any(step_of(name) is not None for name in folders):
        base = place / 'checkpoints' if 'checkpoints' in folders else place
        steps = StepCopies(store, base, place_of(str(base))).steps()
        found = [base / folder_name(step) for step in reversed(steps)]
      else:
        found = [place] if 'state' in folders else []
    if not found:
      raise UserError(
        f'{address} holds no weights: neither checkpoints/ of a run nor state/ of imported ones'
      )
    for each in found:
      for name in (CHECKSUMS, _METADATA):
        with contextlib.suppress(AbsentError):  # Imported weights have no metadata.
          copy_of(each / name)
    run = found[0].parent.parent if found[0].parent.name == 'checkpoints' else found[0]
    with contextlib.suppress(AbsentError):
      copy_of(run, largest=SMALL, deep=False)
    return [place_of(str(each)) for each in found]

  @contextlib.contextmanager
  def holding(
    self, address: str, folder: pathlib.Path, max_to_keep: int, lock: FolderLock
  ) -> Iterator[int]:
    from paxlite.stores.stored_run import StoredRun

    with StoredRun(Address.parsed(address), folder, max_to_keep, lock) as run:
      yield run.hosts.count


STORES = Stores()
