"""Paths with a scheme, such as gs://bucket/file: extensions read and write them.

An address is text, as `Scheme.checked` returns it: the scheme, and names with slashes between them.
Copies on this machine are in paxlite/objects in XDG_CACHE_HOME or ~/.cache, below the scheme, at
the same path.
"""

import abc
import contextlib
import os
import pathlib
import re
from typing import IO, TYPE_CHECKING

from paxlite import extensions
from paxlite.core.errors import AbsentError, UserError
from paxlite.core.extension import imported
from paxlite.files.content import Content, FileContent, OpenedContent

if TYPE_CHECKING:
  from paxlite.files.folder_lock import FolderLock

SMALL = 1 << 27  # bytes of the largest file that comes with a tokenizer or describes a run
_START = re.compile(r'([A-Za-z][A-Za-z0-9+.-]*)://')


class Scheme(abc.ABC):
  """Reads and writes the paths of a scheme, for the core.

  A subclass overrides `open` and `names`, with which data are read, and of the rest what it can.

  All methods raise UserError if a place cannot be used, and AbsentError if nothing is there.
  """

  def checked(self, address: str) -> str:
    """Returns an address as it is written everywhere; raises UserError if it is none."""
    return address.rstrip('/')

  @abc.abstractmethod
  def open(self, address: str) -> IO[bytes]:
    """Opens a file that is read from its beginning to its end, and that can seek."""

  @abc.abstractmethod
  def names(self, address: str) -> list[str]:
    """Returns the names of all files below an address, relative to it; [] if there is none."""

  def content(self, address: str, kept: bool = True) -> Content:
    """Returns the bytes of a file that is read in any order.

    Args:
      address: The file.
      kept: Whether what was read may be kept on this machine, because it is read again.
    """
    return OpenedContent(self.open(address))

  def exists(self, address: str) -> bool:
    """Returns whether there is a file, or files below the address."""
    with contextlib.suppress(OSError, AbsentError), self.open(address):
      return True
    return bool(self.names(address))

  def copy(self, address: str, largest: int | None = None, deep: bool = True) -> pathlib.Path:
    """Copies a file, or the files below an address, to `place_of(address)`, which it returns.

    Args:
      address: The file, or what the files are below.
      largest: Larger files, in bytes, are left out.
      deep: Whether to copy files that are not directly below the address.
    """
    raise _refusal(address)

  def write(self, address: str, content: bytes) -> None:
    """Writes a file whole. Raises OSError as well."""
    raise _refusal(address)

  def check_writable(self, address: str) -> None:
    """Checks that a file can be written. Raises OSError as well."""
    raise _refusal(address)

  def upload(self, folder: pathlib.Path, address: str, last: str) -> None:
    """Copies the files of a folder to below an address; hidden folders are left out.

    Args:
      address: Where its files come.
      last: The name of the file that is copied last.
    """
    raise _refusal(address)

  def checkpoints(self, address: str) -> list[pathlib.Path]:
    """Returns the copies of the checkpoints of a run, or of imported weights, the newest first.

    Only files that describe them are copied; `complete` copies the others.
    """
    raise _refusal(address)

  def holding(
    self, address: str, folder: pathlib.Path, max_to_keep: int, lock: 'FolderLock'
  ) -> contextlib.AbstractContextManager[int]:
    """A context in which a run may use its folder, which equals what is at the address.

    It gets the files of the address at the beginning, and its new files are copied there. The
    context is the number of folders that the processes of the run have.

    Args:
      address: The run's job_log_dir.
      folder: The folder on this machine.
      max_to_keep: Number of checkpoints to keep at the address.
    """
    raise _refusal(address)


def _refusal(address: str) -> UserError:
  return UserError(
    f'{address}: only data can be read from {address.partition("://")[0]}://, not written: name a '
    'path on this machine'
  )


def _known() -> dict[str, str]:
  return {name: where for e in extensions.found() for name, where in e.schemes.items()}


def known() -> list[str]:
  """Returns the schemes that extensions add, each with :// after it."""
  return [f'{name}://' for name in _known()]


def is_address(text: str) -> bool:
  """Returns whether `text` begins with a scheme that an extension adds."""
  found = _START.match(text)
  return found is not None and found[1] in _known()


def scheme_of(address: str) -> Scheme:
  """Returns what reads and writes an address's scheme; UserError if that is no Scheme."""
  where = _known()[address.partition(':')[0]]
  scheme = imported(where)
  if not isinstance(scheme, Scheme):
    raise UserError(f'{address}: the extension names {where}, which is not a Scheme')
  return scheme


def content_of(path: str, kept: bool = True) -> Content:
  """Returns the bytes of a file at a path or an address, as `Scheme.content` does."""
  if is_address(path):
    return scheme_of(path).content(path, kept)
  return FileContent(pathlib.Path(path))


def local(text: str, largest: int | None = None) -> str:
  """Returns a path on this machine for `text`, a path or an address, which is copied.

  Args:
    text: A path, or the address of a file or of what is below.
    largest: Larger files, in bytes, are left out.
  """
  if not is_address(text):
    return text
  scheme = scheme_of(text)
  return str(scheme.copy(scheme.checked(text), largest))


def cache() -> pathlib.Path:
  """Returns the folder of all copies."""
  return pathlib.Path(os.environ.get('XDG_CACHE_HOME') or '~/.cache').expanduser() / (
    'paxlite/objects'
  )


def place_of(address: str) -> pathlib.Path:
  """Returns where the copy of an address is, or would be."""
  scheme, _, names = address.partition('://')
  return cache() / scheme / names


def address_of(path: pathlib.Path) -> str | None:
  """Returns the address that a path is a copy of, or None."""
  try:
    scheme, *names = path.relative_to(cache()).parts
  except ValueError:
    return None
  return f'{scheme}://{"/".join(names)}'


def shown(path: pathlib.Path) -> str:
  """Returns the address that a path is a copy of, or else the path, for messages."""
  return address_of(path) or str(path)


def complete(folder: pathlib.Path) -> None:
  """Copies the missing files of a checkpoint, if `folder` is a copy."""
  address = address_of(folder)
  if address is not None:
    scheme_of(address).copy(address)


def records_of(run: str) -> pathlib.Path:
  """Returns the folder of a run; of one at an address, records are copied, and no checkpoints.

  Raises UserError if there is no run at the address, or it cannot be used.
  """
  if not is_address(run):
    return pathlib.Path(run).expanduser().absolute()
  scheme = scheme_of(run)
  address = scheme.checked(run)
  place = scheme.copy(address, deep=False)
  with contextlib.suppress(AbsentError):
    scheme.copy(f'{address}/goodput')
  return place
