"""Compiled programs that the tests keep from session to session, in the user's cache folder.

JAX finds a program by a hash of its text, its options and the compiler's version. The folder is one
of these versions and of this processor, so that no program runs that another machine has compiled.
A session writes at its end which files are whole, and the next one removes all others, which a
session that was killed may have left half written.
"""

import fcntl
import hashlib
import importlib.metadata
import json
import os
import pathlib
import platform
import shutil
import sys
import time

_WHOLE = 'whole.json'  # the sizes of files by their names
_MOST_BYTES = 6 << 30
_KEPT_DAYS = 14  # for folders of other versions


class KeptPrograms:
  """The folder, which this session has for itself until it ends.

  Raises:
    BlockingIOError: Another session has it.
  """

  def __init__(self, root: pathlib.Path):
    self.folder = root / _key()
    self.folder.mkdir(parents=True, exist_ok=True)
    self._lock = open(root / f'{self.folder.name}.lock', 'w')  # noqa: SIM115 - until the end
    fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    _remove_old(root, self.folder)
    whole = self.folder / _WHOLE
    sizes = json.loads(whole.read_text()) if whole.exists() else {}
    whole.unlink(missing_ok=True)
    for path in self.folder.iterdir():
      if path.stat().st_size != sizes.get(path.name):
        path.unlink()

  def close(self) -> None:
    """Removes the oldest programs if there are too many, and states which are whole."""
    left = _MOST_BYTES
    sizes = {}
    for path in sorted(self.folder.iterdir(), key=lambda p: p.stat().st_mtime, reverse=True):
      size = path.stat().st_size
      left -= size
      if left < 0:
        path.unlink()
      else:
        sizes[path.name] = size
    (self.folder / _WHOLE).write_text(json.dumps(sizes))
    self._lock.close()


def default_root() -> pathlib.Path:
  home = os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache'
  return pathlib.Path(home) / 'paxlite' / 'tests'


def _key() -> str:
  """Returns a name for what decides whether a compiled program is right here."""
  versions = [importlib.metadata.version(name) for name in ('jax', 'jaxlib', 'libtpu')
              if _is_installed(name)]  # fmt: skip
  text = ' '.join([*versions, sys.version, platform.machine(), _processor()])
  return hashlib.sha256(text.encode()).hexdigest()[:16]


def _is_installed(name: str) -> bool:
  try:
    return bool(importlib.metadata.version(name))
  except importlib.metadata.PackageNotFoundError:
    return False


def _processor() -> str:
  """Returns the model and the features of the first processor; '' where /proc does not tell."""
  try:
    lines = pathlib.Path('/proc/cpuinfo').read_text().partition('\n\n')[0].splitlines()
  except OSError:
    return ''
  return ' '.join(x for x in lines if x.startswith(('model name', 'flags', 'Features')))


def _remove_old(root: pathlib.Path, ours: pathlib.Path) -> None:
  before = time.time() - _KEPT_DAYS * 86400
  for folder in root.iterdir():
    if folder.is_dir() and folder != ours and folder.stat().st_mtime < before:
      shutil.rmtree(folder, ignore_errors=True)
