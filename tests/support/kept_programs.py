"""Compiled programs that the tests keep from session to session, in the user's cache folder.

JAX finds a program by a hash of its text, its options and the compiler's version. The folder is one
of this processor, so that no program runs that another machine has compiled. A session writes at
its end which files are whole, and the next one removes all others, which a session that was killed
may have left half written.
"""

import fcntl
import json
import pathlib

import zstandard

from paxlite.compilation import cache
from paxlite.files.ownership import open_to_others

_WHOLE = 'whole.json'  # the sizes of files by their names
_MOST_BYTES = 6 << 30


class KeptPrograms:
  """The folder, which this session has for itself until it ends.

  Raises:
    OSError: Another session has it, or others could write machine code to it.
  """

  def __init__(self, root: pathlib.Path):
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    if (others := open_to_others(root.resolve())) is not None:
      raise PermissionError(f'others can write to {others}')
    self.folder = root / cache.programs_folder().name
    self.folder.mkdir(mode=0o700, exist_ok=True)
    self._lock = open(root / f'{self.folder.name}.lock', 'w')  # noqa: SIM115 - until the end
    fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    self._sizes = self._whole()
    for path in self._files():
      if path.stat().st_size != self._sizes.get(path.name):
        path.unlink()

  def close(self) -> None:
    """Removes what is damaged, and the oldest if there are too many; states which are whole."""
    left, sizes = _MOST_BYTES, {}
    for path in sorted(self._files(), key=lambda p: p.stat().st_mtime, reverse=True):
      size = path.stat().st_size
      left -= size
      if left < 0 or (path.name not in self._sizes and not _is_whole(path)):
        path.unlink()
      else:
        sizes[path.name] = size
    written = self.folder / f'{_WHOLE}.new'
    written.write_text(json.dumps(sizes))
    written.replace(self.folder / _WHOLE)
    self._lock.close()

  def _files(self) -> list[pathlib.Path]:
    return [p for p in self.folder.iterdir() if p.is_file() and not p.name.startswith(_WHOLE)]

  def _whole(self) -> dict[str, int]:
    try:
      found = json.loads((self.folder / _WHOLE).read_text())
    except (OSError, ValueError):  # there is none yet, or a full disk cut it
      return {}
    return found if isinstance(found, dict) else {}


def _is_whole(path: pathlib.Path) -> bool:
  """Returns whether JAX could decompress a program; a process may have been killed at writing."""
  reader = zstandard.ZstdDecompressor().decompressobj()
  try:
    with path.open('rb') as file:
      while part := file.read(1 << 20):
        reader.decompress(part)
  except (OSError, zstandard.ZstdError):
    return False
  return reader.eof


def default_root() -> pathlib.Path:
  return cache.cache_folder() / 'tests'
