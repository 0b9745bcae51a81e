"""Checkpoints of a run in an object store; methods raise the errors of ObjectStore.

A store has no folders that could be renamed, so a checkpoint is complete when its checksums.json is
there. This file is written last, and only if there is none. When a checkpoint is deleted, this file
is deleted first. A step without it was left by a process that was killed.
"""

import concurrent.futures
import contextlib
import errno
import json
import logging
import os
import pathlib
import shutil
import sys
import time
import zlib
from collections.abc import Callable

from paxlite.checkpointing.checksums import CHECKSUMS, Sum, checksum, damage, folder_name, step_of
from paxlite.core.json_text import parsed
from paxlite.files.set_aside import unused_name
from paxlite.processes.hosts import Hosts
from paxlite.stores.object_store import Object, ObjectStore
from paxlite.stores.stored_files import files_below

_AT_ONCE = 4  # files that are copied at the same time
_HOST = '.host-{:05d}.json'  # checksums of the files that one of several hosts has written
_LOOK_SECONDS = 1.0
_PATIENCE = 60.0  # seconds for which host 0 waits for the files of the others, each time
_ONE_HOST = Hosts()

log = logging.getLogger('paxlite')


class AbandonedError(Exception):
  """The step is not uploaded: its folder was deleted, or the store has it already."""


class StepCopies:
  """The checkpoints of a run in a store, and those in a folder on this machine.

  Args:
    store: The store of the run's job_log_dir.
    name: What the checkpoints are below, such as best/checkpoints.
    folder: The folder of Orbax's checkpoints.
    hosts: The hosts; each of several has its own folder, with the files that it has written.
    known: The name of an object that is there, in a folder above. It proves that there are no
      steps; see ObjectStore.folders.
    max_to_keep: Number of steps to keep in the store.
    before_complete: Is called by host 0 before a step that it copies becomes complete.
  """

  def __init__(
    self,
    store: ObjectStore,
    name: str,
    folder: pathlib.Path,
    hosts: Hosts = _ONE_HOST,
    known: str | None = None,
    max_to_keep: int = sys.maxsize,
    before_complete: Callable[[], None] = lambda: None,
  ):
    self._store, self._name, self._folder, self._known = store, name, folder, known
    self._hosts, self._leads = hosts, hosts.index == 0  # writes the checksums and deletes steps
    self._max_to_keep, self._before_complete = max_to_keep, before_complete
    self._done: tuple[tuple[int, int], set[str]] = (0, 0), set()  # a step, and its copied files
    self._stored: set[int] = set()
    self._copied: dict[int, tuple[int, int]] = {}  # a stamp of the local folder of each copied step

  def steps(self) -> list[int]:
    """Returns the complete steps in the store in ascending order."""
    return sorted(step for step, complete in self._found().items() if complete)

  def unfinished(self) -> list[int]:
    """Returns the steps that have objects in the store, but no checksums."""
    return [step for step, complete in self._found().items() if not complete]

  def remove_unfinished(self) -> None:
    """Deletes what is left of steps that are not complete."""
    for step in self.unfinished():
      self._store.delete_below(self._key(step))

  def delete(self, step: int) -> None:
    """Deletes a step in the store."""
    self._done = (0, 0), set()
    self._store.delete([self._key(step, CHECKSUMS)])
    self._store.delete_below(self._key(step))

  def upload(self, step: int) -> None:
    """Copies a step to the store; host 0 waits for the files of the others.

    After a failure it can be called again, and continues with the files that are left. Raises
    AbandonedError if the folder was deleted, or the store has the step.
    """
    try:
      own, content = self._copy_files(step)
    except (FileNotFoundError, NotADirectoryError) as e:
      raise AbandonedError(f'step {step} was deleted before it was copied ({e})') from None
    if not self._leads:
      self._store.write(self._key(step, _HOST.format(self._hosts.index)), json.dumps(own).encode())
      return
    if self._hosts.count > 1:
      content = self._merged(step, own)
    self._before_complete()
    if self._store.create(self._key(step, CHECKSUMS), content) is None:
      raise AbandonedError(f'step {step} is in the store already')

  def _copy_files(self, step: int) -> tuple[dict, bytes]:
    """Copies those files of a step that this host writes and that were not copied before.

    Returns the checksums of this host's files, and the content of the folder's checksums.json.
    """
    folder = self._folder / folder_name(step)
    own = parsed((folder / CHECKSUMS).read_bytes())
    names = [n for n in _files(folder) if n != CHECKSUMS]
    if not self._leads:
      names = list(filter(_is_of_one_host, names))
      own = {name: own[name] for name in names if name in own}
    version = step, (folder / CHECKSUMS).stat().st_mtime_ns
    if self._done[0] != version:
      self._done = version, set()
    done = self._done[1]

    def copy(name: str) -> None:
      try:
        self._store.upload(self._key(step, name), folder / name)
      except FileNotFoundError as e:
        if not (folder / name).exists():
          raise
        # The store does not know its own upload: this may pass.
        raise OSError(errno.EIO, 'the store has lost an upload', e.filename) from e
      done.add(name)

    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
      list(pool.map(copy, [name for name in names if name not in done]))  # a failure cancels others
    return own, (folder / CHECKSUMS).read_bytes()  # raises if the step was deleted meanwhile

  def is_same(self, step: int) -> bool:
    """Returns whether a complete step in the store is the one in the folder.

    Each of several hosts has the checksums of its own files only.
    """
    theirs, mine = self._checksums(step)
    return bool(mine) and (
      theirs == mine if self._hosts.count == 1 else mine.items() <= theirs.items()
    )

  def _is_newer(self, step: int) -> bool:
    """Returns whether the folder has a good step that is another one than that in the store.

    This happens when a run rolled back, saved the step again, and was killed before the upload. A
    folder with the files of one of several hosts is a part of the step in the store.
    """
    theirs, mine = self._checksums(step)
    if self._hosts.count > 1 or not mine or mine.items() <= theirs.items():
      return False
    return damage(self._folder / folder_name(step)) is None

  def _checksums(self, step: int) -> tuple[dict[str, Sum], dict[str, Sum]]:
    """Returns the checksums of a step in the store and in the folder; {} where there are none."""
    theirs = mine = b''
    with contextlib.suppress(FileNotFoundError):
      theirs = self._store.read(self._key(step, CHECKSUMS))
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
      mine = (self._folder / folder_name(step) / CHECKSUMS).read_bytes()
    return _sums(theirs), _sums(mine)

  def download(self, step: int) -> bool:
    """Copies a complete step into the folder; files that are there and good are kept.

    Returns:
      Whether all files are as their checksums say. Damaged files stay in the folder, too.
    """
    final = self._folder / folder_name(step)
    folder = final.with_name(f'{final.name}.download')
    manifest = self._store.read(self._key(step, CHECKSUMS))
    if final.exists():
      shutil.rmtree(folder, ignore_errors=True)
      final.rename(folder)
    folder.mkdir(parents=True, exist_ok=True)
    expected = _sums(manifest)
    listed = files_below(self._store, self._key(step), self._key(step, CHECKSUMS))
    is_of_step = lambda name: name != CHECKSUMS and not name.startswith('.host-')
    present = {name: found[0] for name, found in listed.items() if is_of_step(name)}
    for name in set(_files(folder)) - present.keys():
      (folder / name).unlink()
    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
      get = lambda name: self._get(present[name], folder / name, expected.get(name))
      bad = [n for n, good in zip(present, pool.map(get, present), strict=True) if not good]
    if bad:
      more = f', and so are {len(bad) - 1} more files of this step' if len(bad) > 1 else ''
      place = self._store.address(self._key(step, bad[0]))
      log.warning('%s is damaged (size or CRC-32 differs)%s', place, more)
    (folder / CHECKSUMS).write_bytes(manifest)
    folder.rename(final)
    return not bad and bool(expected) and expected.keys() <= present.keys()

  def _get(self, found: Object, path: pathlib.Path, expected: Sum | None) -> bool:
    """Gets a file, a second time if it is not as expected; returns whether it is good."""
    if path.is_file() and expected is not None and checksum(path) == expected:
      return True
    path.parent.mkdir(parents=True, exist_ok=True)
    for _ in range(2):
      size = crc = 0
      with path.open('wb') as f:
        if found.size:  # A store answers a range of an empty object with an error.
          for data in self._store.chunks(found.name, None if expected else found.size):
            size, crc = size + len(data), zlib.crc32(data, crc)
            f.write(data)
      if expected is None or (size, crc) == expected:
        return True
    return False

  def _merged(self, step: int, own: dict) -> bytes:
    """Waits for the checksums of all hosts, and returns them as one file."""
    merged = dict(own)
    until = time.monotonic() + _PATIENCE
    for host in range(1, self._hosts.count):
      key = self._key(step, _HOST.format(host))
      while True:
        self._store.guard()
        if not (self._folder / folder_name(step)).is_dir():
          raise AbandonedError(f'step {step}: host {host} has not copied its files')
        with contextlib.suppress(FileNotFoundError):
          merged |= parsed(self._store.read(key))
          break
        if time.monotonic() > until:
          reason = f'host {host} has not copied its part of step {step}'
          raise TimeoutError(errno.ETIMEDOUT, reason, self._store.address(self._name))
        time.sleep(_LOOK_SECONDS)
    return json.dumps(dict(sorted(merged.items()))).encode()

  def _found(self) -> dict[int, bool]:
    """Returns the steps in the store, and whether each of them is complete."""
    folders = self._store.folders(self._name, self._known)
    steps = [step for step in map(step_of, folders) if step is not None]

    def is_complete(step: int) -> bool:
      with contextlib.suppress(FileNotFoundError):
        self._store.head(self._key(step, CHECKSUMS))
        return True
      return False

    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
      return dict(zip(steps, pool.map(is_complete, steps), strict=True))

  def _key(self, step: int, name: str = '') -> str:
    return '/'.join(filter(None, (self._name, folder_name(step), name)))

  def newest_good(self) -> int | None:
    """Makes the newest good step of the store and the folder complete in the folder.

    Files of a step in the store that are missing or damaged in the folder are copied into it. A
    step that is damaged in both places is in the folder afterwards, where Checkpoints finds the
    damage. Returns None if no step is good.
    """
    stored, local = self.steps(), self.local()
    for step in sorted({*stored, *local}, reverse=True):
      if step in stored and self._is_newer(step):
        return step
      if step in stored:
        with contextlib.suppress(FileNotFoundError):  # It was deleted in the meantime.
          if self.download(step):
            return step
      elif damage(self._folder / folder_name(step)) is None:
        return step
    return None

  def local(self) -> list[int]:
    """Returns the steps in the folder in ascending order."""
    with contextlib.suppress(FileNotFoundError):
      return sorted(step for step in map(step_of, os.listdir(self._folder)) if step is not None)
    return []

  def set_aside(self, step: int) -> pathlib.Path:
    """Renames a step in the folder, so that it no longer counts; returns its new path."""
    path = self._folder / folder_name(step)
    return path.rename(unused_name(path.with_name(f'left_{path.name}')))

  def begin(self) -> None:
    """Compares the store with the folder; must be called before `look`."""
    self._stored = set(self.steps())
    for step, stamp in self._stamps().items():
      if step in self._stored and (not self._leads or self.is_same(step)):
        self._copied[step] = stamp

  def pending(self) -> list[int]:
    """Returns the steps in the folder that are not in the store yet, in ascending order."""
    return [step for step, stamp in self._stamps().items() if self._copied.get(step) != stamp]

  def look(self) -> None:
    """Copies new steps, and deletes those that the run has deleted, moved aside or replaced.

    Nothing is deleted while the run may not write: the guard of the store raises OSError.
    """
    local = self._stamps()
    if self._copied and not local:  # a run always keeps a step, so something else removed them
      reason = 'its checkpoints are gone; none is deleted in the store'
      raise FileNotFoundError(errno.ENOENT, reason, str(self._folder))
    for step in [s for s, stamp in self._copied.items() if local.get(s) != stamp]:
      self._drop(step)
      del self._copied[step]
    for step in [s for s, stamp in local.items() if self._copied.get(s) != stamp]:
      self._drop(step)  # a step of the same number, from another history
      try:
        self.upload(step)
      except AbandonedError as e:
        log.debug('%s', e)
        if self._leads and step not in self._stamps():
          self.delete(step)  # It was deleted here while it was copied.
        continue
      self._copied[step] = local[step]
      self._stored.add(step)
    for step in sorted(self._stored)[: -self._max_to_keep] if self._leads else ():
      self._drop(step)

  def _drop(self, step: int) -> None:
    """Deletes a step in the store, if it is there and this host leads."""
    if self._leads and step in self._stored:
      self.delete(step)
    self._stored.discard(step)

  def _stamps(self) -> dict[int, tuple[int, int]]:
    """Returns the committed steps in the folder, each with a stamp that a new save changes."""
    found = {}
    for step in self.local():
      path = self._folder / folder_name(step)
      with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        found[step] = path.stat().st_ino, (path / CHECKSUMS).stat().st_mtime_ns
    return found


def _sums(content: bytes) -> dict[str, Sum]:
  """Reads checksums.json; {} if it is damaged."""
  try:
    return {str(name): (int(size), int(crc)) for name, (size, crc) in parsed(content).items()}
  except (ValueError, TypeError, AttributeError):
    return {}


def _is_of_one_host(name: str) -> bool:
  """Returns whether a file is a part of an array; each host has all other files, as host 0 has."""
  path = pathlib.PurePosixPath(name)
  return path.parts[0] == 'state' and len(path.parts) > 2 and path.name[0] not in '._'


def _files(folder: pathlib.Path) -> list[str]:
  return sorted(p.relative_to(folder).as_posix() for p in folder.rglob('*') if p.is_file())
