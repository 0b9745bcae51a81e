"""Local copies of objects that are read as whole files.

Each use compares them with the store, and copies the objects that have changed. If they take more
than PAXLITE_CACHE_GB (100), those that were not used for the longest time, and by no process now,
are removed.
"""

import concurrent.futures
import contextlib
import fcntl
import hashlib
import json
import os
import pathlib
from typing import IO

from paxlite.core.errors import AbsentError, UserError
from paxlite.core.json_text import JsonObject, parsed
from paxlite.core.run_files import write_file
from paxlite.files.schemes import cache, place_of
from paxlite.stores.object_store import Object, ObjectStore
from paxlite.stores.store_errors import reading
from paxlite.stores.stored_files import files_below

_AT_ONCE = 4
_in_use: dict[pathlib.Path, IO[bytes]] = {}  # locks of the copies that this process uses


def copy_of(address: str, largest: int | None = None, deep: bool = True) -> pathlib.Path:
  """Copies an object, or the objects below a prefix, to this machine; returns the path.

  Args:
    address: The object or the prefix.
    largest: Larger objects, in bytes, are left out.
    deep: Whether to copy objects below further prefixes.

  Raises:
    UserError: There is nothing, or the store cannot be used, or the copies need too much space.
  """
  place = place_of(address)
  with reading(address):
    store = ObjectStore(address)
    found: dict[pathlib.Path, list[Object]] = {}
    if not store.is_bucket:
      with contextlib.suppress(FileNotFoundError):
        found = {place: [store.head('')]}
    if not found or not found[place][0].size:  # It may be the marker of a folder.
      below = {
        place / name: objects
        for name, objects in files_below(store).items()
        if (deep or '/' not in name) and (largest is None or _size(objects) <= largest)
      }
      found = below or found
    if not found:
      raise AbsentError(f'{address} does not exist: no object has this name or prefix')
    _copy(store, address, found)
  return place


def _copy(store: ObjectStore, address: str, found: dict[pathlib.Path, list[Object]]) -> None:
  """Copies the objects whose tags have changed.

  A file beside the copies has their tags. No other process removes them while this one lives.
  """
  digest = hashlib.sha256(address.encode()).hexdigest()[:16]
  index = cache() / 'notes' / f'{digest}.json'
  if index not in _in_use:
    index.parent.mkdir(parents=True, exist_ok=True)
    _in_use[index] = index.with_suffix('.use').open('ab')
    fcntl.flock(_in_use[index], fcntl.LOCK_SH)
  os.utime(index.with_suffix('.use'))
  with index.with_suffix('.lock').open('ab') as f:
    fcntl.flock(f, fcntl.LOCK_EX)  # until it is closed
    known = _read(index).get('tags', {})
    tags = {str(path): [o.tag for o in objects] for path, objects in found.items()}
    wanted = [p for p in found if known.get(str(p)) != tags[str(p)] or not p.is_file()]
    _make_room(sum(_size(found[p]) for p in wanted), index)
    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
      list(pool.map(lambda path: _download(store, path, found[path]), wanted))
    for gone in known.keys() - tags.keys():
      pathlib.Path(gone).unlink(missing_ok=True)
    about = {'address': address, 'size': sum(map(_size, found.values())), 'tags': tags}
    write_file(index, json.dumps(about).encode())


def _download(store: ObjectStore, path: pathlib.Path, pieces: list[Object]) -> None:
  path.parent.mkdir(parents=True, exist_ok=True)
  unfinished = path.with_name(f'{path.name}.tmp')
  with unfinished.open('wb') as f:
    for piece in pieces:
      for data in store.chunks(piece.name, piece.size) if piece.size else ():
        f.write(data)
  unfinished.replace(path)


def _size(objects: list[Object]) -> int:
  return sum(o.size for o in objects)


def _read(index: pathlib.Path) -> JsonObject:
  try:
    return dict(parsed(index.read_text()))
  except (OSError, ValueError, TypeError):
    return {}


def most_bytes() -> int:
  """Returns the space limit of the copies in bytes.

  Raises UserError if PAXLITE_CACHE_GB is not a number.
  """
  text = os.environ.get('PAXLITE_CACHE_GB', '100')
  try:
    return int(float(text) * 1e9)
  except (ValueError, OverflowError):
    raise UserError(f'PAXLITE_CACHE_GB={text} is not a number') from None


def _make_room(size: int, own: pathlib.Path) -> None:
  """Removes the copies used least recently until there is room for `size` bytes more."""
  most = most_bytes()
  others = {p: _read(p) for p in own.parent.glob('*.json') if p != own}
  others = {p: about for p, about in others.items() if isinstance(about.get('size'), int)}
  used = sum(about['size'] for about in others.values())
  for path in sorted(others, key=lambda p: p.with_suffix('.use').stat().st_mtime):
    if used + size <= most:
      return
    with path.with_suffix('.use').open('ab') as f:
      try:
        fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except OSError:
        continue  # A process uses it.
      for name in _read(path).get('tags', ()):  # as it is now
        pathlib.Path(name).unlink(missing_ok=True)
      path.unlink(missing_ok=True)
      used -= others[path]['size']
  if used + size > most:
    raise UserError(
      f'copies of objects would take {(used + size) / 1e9:,.1f} GB in {cache()}, but '
      f'PAXLITE_CACHE_GB allows {most / 1e9:,.1f}: set it to more, or XDG_CACHE_HOME to a larger '
      'disk'
    )
