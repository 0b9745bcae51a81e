"""Ends a run that hangs, and says where: the stacks of every thread, in a file a process.

No other part of a run notices a hang. A collective waits for as long as the processes in it live,
and heartbeats go on while a main thread waits.
"""

import contextlib
import datetime
import faulthandler
import os
import pathlib
import sys
import threading
import time
from types import TracebackType

import jax

from paxlite.errors import EXIT_AGAIN
from paxlite.run_files import open_file
from paxlite.terminal import settle, warn

_GRACE_SECONDS = (
  5  # the others notice at nearly the same moment: let them write before peers are gone
)


class Watchdog:
  """A context in which `beat` has to be called at least every `timeout` seconds.

  Otherwise the process writes its stacks and ends with EXIT_AGAIN. Before the first call, and after
  `pause`, anything may take any time, compilation above all.

  Args:
    folder: Stacks go to folder/stacks/process_%05d.txt.
    timeout: Seconds without a beat; 0 for no limit.
    interval: Stacks are written every so many seconds in any case; 0 for never.
  """

  def __init__(self, folder: pathlib.Path, timeout: float = 0.0, interval: float = 0.0):
    self._path = folder / 'stacks' / f'process_{jax.process_index():05d}.txt'
    self._timeout = timeout
    self._interval = interval
    self._last_beat: float | None = None
    self._left = threading.Event()
    self._thread = threading.Thread(target=self._watch, name='watchdog', daemon=True)

  def __enter__(self) -> 'Watchdog':
    if self._timeout or self._interval:
      self._thread.start()
    return self

  def __exit__(
    self,
    kind: type[BaseException] | None,
    error: BaseException | None,
    traceback: TracebackType | None,
  ) -> None:
    self._left.set()

  def beat(self) -> None:
    """There is progress."""
    self._last_beat = time.monotonic()

  def pause(self) -> None:
    """What comes until the next beat may take any time."""
    self._last_beat = None

  def _watch(self) -> None:
    shortest = min(x for x in (self._timeout, self._interval) if x)
    last_stacks = time.monotonic()
    while not self._left.wait(min(1.0, shortest / 4)):
      now = time.monotonic()
      if self._interval and now - last_stacks >= self._interval:
        last_stacks = now
        self._write_stacks(f'every {self._interval:g} s')
      last_beat = self._last_beat
      if self._timeout and last_beat is not None and now - last_beat > self._timeout:
        self._end()

  def _end(self) -> None:
    reason = f'no progress for {self._timeout:g} s (STEP_TIMEOUT)'
    written = self._write_stacks(reason)
    where = f'stacks of every thread are in {self._path}' if written else 'stacks are above'
    warn(f'stopped: process {jax.process_index()}: {reason}; {where}')
    time.sleep(_GRACE_SECONDS)
    settle()
    os._exit(EXIT_AGAIN)

  def _write_stacks(self, reason: str) -> bool:
    """Appends every thread's stack to the file; to stderr where that cannot be written."""
    head = f'{datetime.datetime.now().astimezone().isoformat(timespec="seconds")} {reason}\n'
    try:
      self._path.parent.mkdir(exist_ok=True)
      with open_file(self._path, 'a') as f:
        f.write(head)
        f.flush()
        faulthandler.dump_traceback(f)
        f.write('\n')
    except OSError:
      warn(head)
      with contextlib.suppress(OSError, ValueError, RuntimeError, AttributeError):  # none is open
        faulthandler.dump_traceback(sys.stderr)
      return False
    return True
