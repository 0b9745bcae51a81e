"""Ends a run that hangs, and writes the stacks of every thread to one file per process.

No other part of a run notices a hang. A collective waits for as long as its processes live, and
heartbeats continue while a main thread waits.
"""

import dataclasses
import datetime
import os
import pathlib
import sys
import threading
import time
import traceback
from types import TracebackType

import jax

from paxlite.cli.terminal import settle, warn
from paxlite.core.errors import EXIT_AGAIN, listed
from paxlite.core.run_files import make_folder, open_file
from paxlite.processes.peers import Peers
from paxlite.training.goodput import KINDS, Goodput

_SAY_SECONDS = 60.0
_GRACE_SECONDS = (
  5  # The other processes notice at nearly the same moment: this lets them write their stacks.
)


@dataclasses.dataclass(frozen=True)
class Limits:
  """The time limits of a Watchdog, in seconds; 0 means no limit."""

  # longest time for one step, or one batch of an evaluation, before the run is ended
  step: float = 0.0
  # longest time for a longer phase before the run is ended: starting, restoring, compiling, the
  # first batch of an evaluation, the last save
  phase: float = 0.0
  stacks: float = 0.0  # interval at which the stacks are written, even where nothing hangs


def stacks_of_threads() -> str:
  """Returns the stack of every thread, innermost call first.

  The lines of source are left out, because they would have to be read from disk. faulthandler is
  not used: it follows frames of threads that JAX's runtime made, without holding a reference to
  them, and this ended one run in two with a segmentation fault (Python 3.11).
  """
  names = {thread.ident: thread.name for thread in threading.enumerate()}
  lines = []
  for ident, frame in sys._current_frames().items():
    lines.append(f'Thread 0x{ident:x} ({names.get(ident, "not made by Python")}):')
    for call, line in traceback.walk_stack(frame):
      code = call.f_code
      lines.append(f'  File "{code.co_filename}", line {line} in {code.co_name}')
    lines.append('')
  return '\n'.join(lines)


class Watchdog:
  """A context in which the run must make progress.

  Without progress the process writes its stacks and ends with EXIT_AGAIN. With several processes,
  process 0 reports from time to time which of them it waits for.

  Args:
    folder: The stacks are written to folder/stacks/process_%05d.txt.
    limits: The time limits.
    goodput: Knows what the process spends its time on; a change of the kind counts as progress.
    peers: The other processes.

  Attributes:
    goodput: The same.
  """

  def __init__(
    self, folder: pathlib.Path, limits: Limits, goodput: Goodput, peers: Peers | None = None
  ):
    self._path = folder / 'stacks' / f'process_{jax.process_index():05d}.txt'
    self._limits = limits
    self.goodput = goodput
    self._peers = peers or Peers()
    self._beats = 0  # equal in all processes that are equally far
    self._in_steps = False
    self._left = threading.Event()
    self._thread = threading.Thread(target=self._watch, name='watchdog', daemon=True)

  def __enter__(self) -> 'Watchdog':
    if any(dataclasses.astuple(self._limits)) or self._peers.count > 1:
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
    """Notes that a step, or a batch of an evaluation, is done; the next one must follow soon."""
    self._beats += 1
    self._in_steps = True

  def pause(self) -> None:
    """Notes progress; what follows until the next beat may take longer than a step."""
    self._beats += 1
    self._in_steps = False

  def _watch(self) -> None:
    limits = self._limits
    shortest = min((x for x in dataclasses.astuple(limits) if x), default=_SAY_SECONDS)
    last_stacks = last_change = said = time.monotonic()
    seen: tuple[int, str, bool] | None = None
    while not self._left.wait(min(1.0, shortest / 4)):
      now = time.monotonic()
      if limits.stacks and now - last_stacks >= limits.stacks:
        last_stacks = now
        self._write_stacks(f'every {limits.stacks:g} s')
      state = self._beats, self.goodput.kind, self._in_steps
      if state != seen:
        seen, last_change, said = state, now, now
        self._peers.report(self._progress, self._phase)
      if now - said >= _SAY_SECONDS and (behind := self._behind()):
        said = now
        seconds = f'{now - last_change:.0f} s'
        warn(f'{self._phase}: process {jax.process_index()} waits for {behind} ({seconds})')
      limit, name = (limits.step, 'STEP') if self._in_steps else (limits.phase, 'PHASE')
      if limit and now - last_change > limit:
        self._end(f'{self._phase}: no progress for {limit:g} s ({name}_TIMEOUT)')

  @property
  def _phase(self) -> str:
    return KINDS[self.goodput.kind]

  @property
  def _progress(self) -> int:
    """A number that grows during a run, and is the same in processes that are equally far."""
    return self._beats

  def _behind(self) -> str:
    """Names the processes that are not as far as this one, and what they do."""
    found = [f'process {i} ({phase})' for i, phase in self._peers.behind(self._progress).items()]
    return listed(found, shown=4).replace(';', ',')

  def _end(self, reason: str) -> None:
    if behind := self._behind():
      reason = f'{reason}; waiting for {behind}'
    written = self._write_stacks(reason)
    where = f'stacks of every thread are in {self._path}' if written else 'stacks are above'
    warn(f'stopped: process {jax.process_index()}: {reason}; {where}')
    time.sleep(_GRACE_SECONDS)
    settle()
    os._exit(EXIT_AGAIN)

  def _write_stacks(self, reason: str) -> bool:
    """Appends the stack of every thread to the file, or to stderr if the file cannot be written.

    Returns whether the file was written.
    """
    head = f'{datetime.datetime.now().astimezone().isoformat(timespec="seconds")} {reason}\n'
    try:
      make_folder(self._path.parent)
      with open_file(self._path, 'a') as f:
        f.write(f'{head}{stacks_of_threads()}\n')
    except OSError:
      warn(f'{head}{stacks_of_threads()}')
      return False
    return True
