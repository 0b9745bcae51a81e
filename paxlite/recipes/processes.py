"""Runs stages in separate processes, and passes signals on to them."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time
import types
from collections.abc import Iterator, Sequence

from paxlite.core.child_processes import terminated_with_parent
from paxlite.core.errors import Interrupted, UserError
from paxlite.files.folder_lock import FolderLock

_SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
_WAIT_SECONDS = 120  # for a run that saves because the recipe that had started it was killed


class Processes:
  """Runs processes in turn; a signal goes to the running one, or ends the recipe."""

  def __init__(self) -> None:
    self._process: subprocess.Popen[bytes] | None = None
    self._asked = False

  @contextlib.contextmanager
  def listening(self) -> Iterator[None]:
    """A context that passes signals on, or raises Interrupted if no process runs."""
    before = signal.set_wakeup_fd(-1)  # whose thread would not wait for a run that saves
    handlers = {number: signal.signal(number, self._receive) for number in _SIGNALS}
    try:
      yield
    finally:
      for number, handler in handlers.items():
        signal.signal(number, handler)
      signal.set_wakeup_fd(before)

  def _receive(self, number: int, frame: types.FrameType | None) -> None:
    self._asked = True
    if self._process is None:
      self.check()
    else:
      self._process.send_signal(number)

  def check(self) -> None:
    """Raises Interrupted if there was a signal."""
    if self._asked:
      raise Interrupted('asked to leave between two stages')

  def run(self, arguments: Sequence[str]) -> int:
    """Runs `paxlite` with these arguments to its end; returns the exit code."""
    self.check()
    self._process = subprocess.Popen(
      [sys.executable, '-P', '-m', 'paxlite', *arguments],
      stdin=subprocess.DEVNULL,
      env=os.environ | terminated_with_parent(),
    )
    try:
      code = self._process.wait()
    finally:
      self._process = None
    return code if code >= 0 else 128 - code


def wait_until_free(folder: pathlib.Path) -> None:
  """Waits for a run that is still saving in a folder; raises UserError if it keeps running."""
  end = time.monotonic() + _WAIT_SECONDS
  while True:
    lock = FolderLock(folder)
    try:
      lock.acquire()
      return
    except UserError:
      if time.monotonic() > end:
        raise
    finally:
      lock.release()
    time.sleep(0.5)
