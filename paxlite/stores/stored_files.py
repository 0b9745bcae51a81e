"""The local files of the objects below a prefix."""

import re

from paxlite.core.errors import UserError
from paxlite.stores.object_store import Object, ObjectStore

_PIECE = re.compile(r'(.+)\.piece(\d{5})')  # stores cannot append, so files of runs are cut
_MOST_PART, _MOST_NAME = 255, 3000  # bytes of a part of a path, and of a path


def piece_name(name: str, number: int) -> str:
  """Returns the name of piece `number` of a file; the first piece has the file's own name."""
  return f'{name}.piece{number:05d}' if number else name


def is_piece(name: str) -> bool:
  """Returns whether a name belongs to a second or later piece of a file."""
  return _PIECE.fullmatch(name) is not None


def files_below(
  store: ObjectStore, prefix: str = '', known: str | None = None
) -> dict[str, list[Object]]:
  """Returns the names of files, relative to a prefix, with the objects that they consist of.

  Markers of folders are left out. If a piece of a file is missing, the file ends before it.

  Args:
    store: The bucket.
    prefix: The prefix, without a slash at its end.
    known: The name of an object that is there; see ObjectStore.below.

  Raises:
    OSError: The store does not answer, or the answer is no list.
    UserError: The bucket cannot be used, or an object has a name that no file can have.
  """
  listed = {o.name.removeprefix(f'{prefix}/'): o for o in store.below(prefix, known)}
  folders = {name[:i] for name in listed for i, c in enumerate(name) if c == '/'}
  found: dict[str, list[Object]] = {}
  for name in sorted(listed):
    place = store.address(listed[name].name)
    if name in folders:
      if listed[name].size:
        raise UserError(
          f'{place} is both an object and a folder of objects, which a file cannot be: rename or '
          'delete it'
        )
      continue  # a marker of a folder, without a slash at its end
    if (
      max(len(p.encode()) for p in name.split('/')) > _MOST_PART or len(name.encode()) > _MOST_NAME
    ):
      raise UserError(f'{place[:300]}… has a name that is too long for a file: rename or delete it')
    piece = _PIECE.fullmatch(name)
    if piece is None or piece[1] not in found:
      found[name] = [listed[name]]
    elif int(piece[2]) == len(found[piece[1]]):  # sorted: after the pieces before it
      found[piece[1]].append(listed[name])
  return found
