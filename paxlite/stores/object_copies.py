"""Copies on this machine of objects that are read as whole files.

They are in paxlite/objects in XDG_CACHE_HOME or ~/.cache, at the same path as in the bucket. Each
use compares them with the store, and copies the objects that have changed. If they take more than
PAXLITE_CACHE_GB (100), those that were not used for the longest time, and by no process now, are
removed.
"""

import concurrent.futures
import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import pathlib
from collections.abc import Iterator
from typing import IO

from paxlite.core.errors import AbsentError, UnreadableError, UserError
from paxlite.core.json_text import parsed
from paxlite.core.run_files import write_file
from paxlite.files.schemes import cache, place_of
from paxlite.stores.addresses import Address
from paxlite.stores.object_store import Object, ObjectStore
from paxlite.stores.stored_files import files_below

_AT_ONCE = 4
_in_use: dict[pathlib.Path, IO[bytes]] = {}  # locks of the copies that this process uses


def copy_of(address: Address, largest: int | None = None, deep: bool = True) -> pathlib.Path:
  """Copies an object, or the objects below a prefix, to this machine; returns the path.

  Args:
    address: The object or the prefix.
    largest: Larger objects, in bytes, are left out.
    deep: Whether to copy objects below further prefixes.

  Raises:
    UserError: There is nothing, or the store cannot be used, or the copies need too much space.
  """
  place = place_of(str(address))
  with reading(address):
    store = ObjectStore.opened(address)
    found: dict[pathlib.Path, list[Object]] = {}
    if address.key:
      with contextlib.suppress(FileNotFoundError):
        found = {place: [store.head(address.key)]}
    if not found or not found[place][0].size:  # It may be the marker of a folder.
      found = _below(store, address, place, largest, deep) or found
    if not found:
      raise AbsentError(f'{address} is not there: no object has this name or lies below it')
    entry = _Copy.of(address)
    entry.lock()
    with entry.alone():
      entry.get(store, found)
  return place


@contextlib.contextmanager
def reading(address: Address) -> Iterator[None]:
  """A context whose OSErrors become UnreadableErrors that name the address."""
  try:
    yield
  except OSError as e:
    place = e.filename or address
    raise UnreadableError(f'{place} cannot be read: {e.strerror or e}') from None


def _below(
  store: ObjectStore, address: Address, place: pathlib.Path, largest: int | None, deep: bool
) -> dict[pathlib.Path, list[Object]]:
  """Returns the objects below a prefix by the paths of the files that they become."""
  return {
    place / name: objects
    for name, objects in files_below(store, address.key).items()
    if (deep or '/' not in name) and (largest is None or sum(o.size for o in objects) <= largest)
  }


@dataclasses.dataclass(frozen=True)
class _Copy:
  """The copy of one address, and the files that describe it.

  Attributes:
    address: The address.
    index: A file with the tags of the objects that were copied.
  """

  address: Address
  index: pathlib.Path

  @classmethod
  def of(cls, address: Address) -> '_Copy':
    digest = hashlib.sha256(str(address).encode()).hexdigest()[:16]
    return cls(address, cache() / 'notes' / f'{digest}.json')

  def lock(self) -> None:
    """Keeps other processes from removing the copy as long as this process lives."""
    if self.index not in _in_use:
      self.index.parent.mkdir(parents=True, exist_ok=True)
      _in_use[self.index] = self.index.with_suffix('.use').open('ab')
      fcntl.flock(_in_use[self.index], fcntl.LOCK_SH)
    os.utime(self.index.with_suffix('.use'))

  @contextlib.contextmanager
  def alone(self) -> Iterator[None]:
    """A context in which no other process changes the copy."""
    with self.index.with_suffix('.lock').open('ab') as f:
      fcntl.flock(f, fcntl.LOCK_EX)
      yield

  def get(self, store: ObjectStore, found: dict[pathlib.Path, list[Object]]) -> None:
    """Copies the objects whose tags have changed."""
    known = self._known().get('tags', {})
    tags = {str(path): [o.tag for o in objects] for path, objects in found.items()}
    wanted = [p for p in found if known.get(str(p)) != tags[str(p)] or not p.is_file()]
    _make_room(sum(o.size for p in wanted for o in found[p]), self.index)
    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
      list(pool.map(lambda path: _download(store, path, found[path]), wanted))
    for gone in known.keys() - tags.keys():
      pathlib.Path(gone).unlink(missing_ok=True)
    size = sum(o.size for objects in found.values() for o in objects)
    about = {'address': str(self.address), 'size': size, 'tags': tags}
    write_file(self.index, json.dumps(about).encode())

  def _known(self) -> dict:
    try:
      return dict(parsed(self.index.read_text()))
    except (OSError, ValueError, TypeError):
      return {}


def _download(store: ObjectStore, path: pathlib.Path, pieces: list[Object]) -> None:
  path.parent.mkdir(parents=True, exist_ok=True)
  unfinished = path.with_name(f'{path.name}.tmp')
  with unfinished.open('wb') as f:
    for piece in pieces:
      for data in store.chunks(piece.key, piece.size) if piece.size else ():
        f.write(data)
  unfinished.replace(path)


def most_bytes() -> int:
  """Returns how much space the copies may take.

  Raises:
    UserError: PAXLITE_CACHE_GB is not a number.
  """
  text = os.environ.get('PAXLITE_CACHE_GB', '100')
  try:
    return int(float(text) * 1e9)
  except (ValueError, OverflowError):
    raise UserError(f'PAXLITE_CACHE_GB={text} is not a number') from None


def _make_room(size: int, own: pathlib.Path) -> None:
  """Removes the copies used least recently until there is room for `size` bytes more."""
  most = most_bytes()
  others = [p for p in own.parent.glob('*.json') if p != own]
  sizes = {}
  for path in others:
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
      sizes[path] = int(parsed(path.read_text())['size'])
  used = sum(sizes.values())
  by_age = sorted(sizes, key=lambda p: p.with_suffix('.use').stat().st_mtime)
  for path in by_age:
    if used + size <= most:
      return
    with path.with_suffix('.use').open('ab') as f:
      try:
        fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except OSError:
        continue  # A process uses it.
      for name in parsed(path.read_text())['tags']:
        pathlib.Path(name).unlink(missing_ok=True)
      path.unlink()
      used -= sizes[path]
  if size > most or used + size > most:
    raise UserError(
      f'copies of objects would take {(used + size) / 1e9:,.1f} GB in {cache()} and '
      f'PAXLITE_CACHE_GB allows {most / 1e9:,.1f}: set it to more, or XDG_CACHE_HOME to a larger '
      'disk'
    )
