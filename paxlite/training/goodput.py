"""Goodput: the share of a run's wall time in productive steps, over all of its restarts.

Each start of a run is an attempt with its own file, goodput/attempt_%05d.json, which is rewritten
with every report of the loss. This module does not need JAX. `paxlite.main` starts the clock before
it imports anything that takes time. In other programs, which may train several runs, the clock of
each run starts with the run.
"""

import contextlib
import dataclasses
import json
import math
import pathlib
import time
from collections.abc import Iterator

from paxlite.core.json_text import JsonObject, parsed
from paxlite.core.run_files import make_folder, write_file
from paxlite.files.set_aside import set_aside

_FOLDER = 'goodput'

_program_started: list[tuple[float, float]] = []  # times of the two clocks; empty, or one entry

# in the order of the report
KINDS = {
  'step': 'productive steps', 'init': 'starting and building',
  'restore': 'initial values or restoring', 'compile': 'compiling and the first step',
  'data': 'waiting for data', 'evaluation': 'evaluating', 'profile': 'profiling', 'save': 'saving',
  'lost': 'steps done again', 'down': 'not running',
}  # fmt: skip


def start_clock() -> None:
  """Notes that a program has started that does nothing but train one run."""
  _program_started[:] = [_now()]


def _now() -> tuple[float, float]:
  return time.time(), time.perf_counter()


class Goodput:
  """Measures the time of this attempt, by kind.

  Args:
    folder: The run's job_log_dir; if None, nothing is written.
  """

  def __init__(self, folder: pathlib.Path | None):
    self._folder = None if folder is None else folder / _FOLDER
    self._path: pathlib.Path | None = None
    self._started = _program_started.pop() if _program_started else _now()
    self._since = self._started[1]
    self._kind = 'init'
    self._seconds = dict.fromkeys(KINDS, 0.0)
    self._first_step: int | None = None
    self._last_step = 0
    self._lost_steps = 0

  @contextlib.contextmanager
  def spent_on(self, kind: str) -> Iterator[None]:
    """A context whose time counts as this kind, except for inner contexts of other kinds."""
    before = self.switch(kind)
    try:
      yield
    finally:
      self.switch(before)

  def switch(self, kind: str) -> str:
    """Counts the time from now on as this kind; returns the previous kind."""
    now = time.perf_counter()
    self._seconds[self._kind] += now - self._since
    self._since = now
    before, self._kind = self._kind, kind
    return before

  @property
  def kind(self) -> str:
    """The kind, one of KINDS, that time is spent on now."""
    return self._kind

  def excuse(self, seconds: float, kind: str) -> None:
    """Moves time that was counted as `kind` to the productive steps."""
    self._seconds[kind] -= seconds
    self._seconds['step'] += seconds

  def reached(self, step: int) -> None:
    """Notes the step at which the attempt starts (first call), then each of its steps."""
    if self._first_step is None:
      self._first_step = step
    self._last_step = step

  def roll_back(self, step: int) -> None:
    """Counts the steps after `step` as lost, because they are trained again."""
    self._lost_steps += self._last_step - step
    self._last_step = step

  def write(self) -> None:
    """Writes the record of this attempt to its file, for the reports of later attempts."""
    self.switch(self._kind)
    if self._folder is None:
      return
    record = {
      'started': self._started[0],
      'ended': self._started[0] + time.perf_counter() - self._started[1],
      'first_step': self._first_step or 0, 'last_step': self._last_step,
      'lost_steps': self._lost_steps, 'seconds': {k: round(v, 3) for k, v in self._seconds.items()},
    }  # fmt: skip
    with contextlib.suppress(OSError):  # A full disk is reported where checkpoints are written.
      if self._path is None:
        _set_damaged_aside(self._folder)
        self._path = _next_path(self._folder)
      make_folder(self._folder)
      write_file(self._path, json.dumps(record).encode())


@dataclasses.dataclass(frozen=True)
class GoodputReport:
  """The goodput of all attempts of a run."""

  attempts: int  # number of times that the run was started
  seconds: dict[str, float]  # wall time by kind, in seconds

  @property
  def total(self) -> float:
    return sum(self.seconds.values())

  @property
  def goodput(self) -> float:
    """The share of wall time in productive steps, from 0 to 1."""
    return self.seconds['step'] / max(self.total, 1e-9)

  def line(self) -> str:
    shares = (
      f'{KINDS[k]} {v / max(self.total, 1e-9):.1%}'
      for k, v in self.seconds.items()
      if k != 'step' and v >= 0.0005 * self.total
    )
    starts = 'start' if self.attempts == 1 else 'starts'
    return (
      f'Goodput {self.goodput:.1%} of {self.total:,.0f} s in {self.attempts} {starts}: '
      f'{", ".join(shares)}'
    )

  def table(self) -> str:
    starts = 'start' if self.attempts == 1 else 'starts'
    lines = [f'{self.attempts} {starts}, {self.total:,.1f} s']
    lines += [
      f'  {KINDS[k]:30}{v:14,.1f} s {v / max(self.total, 1e-9):7.1%}'
      for k, v in self.seconds.items()
    ]
    return '\n'.join(lines)


def report(folder: pathlib.Path) -> GoodputReport | None:
  """Returns the report of the run in job_log_dir `folder`, or None if there are no records.

  If a later attempt resumed from an earlier step, the steps in between count as lost, at the mean
  time per step of the attempt that did them first. The time after an attempt's last record counts
  as not running. Damaged records are left out.
  """
  attempts = []
  with contextlib.suppress(OSError):
    attempts = [r for p in sorted((folder / _FOLDER).glob('attempt_*.json')) if (r := _read(p))]
  if not attempts:
    return None
  total = dict.fromkeys(KINDS, 0.0)
  for i, attempt in enumerate(attempts):
    following = attempts[i + 1] if i + 1 < len(attempts) else None
    seconds = dict(attempt['seconds'])
    lost = attempt['lost_steps']
    if following is not None:
      resumed = min(later['first_step'] for later in attempts[i + 1 :])
      lost += max(0, attempt['last_step'] - max(resumed, attempt['first_step']))
      # A clock that was set back must not give negative time.
      seconds['down'] += max(0.0, following['started'] - attempt['ended'])
    done = attempt['last_step'] - attempt['first_step'] + attempt['lost_steps']
    again = seconds['step'] * min(1.0, lost / max(done, 1))
    seconds['step'] -= again
    seconds['lost'] += again
    for kind in KINDS:
      total[kind] += seconds[kind]
  return GoodputReport(len(attempts), total)


def _next_path(folder: pathlib.Path) -> pathlib.Path:
  found = [int(p.stem[-5:]) for p in folder.glob(f'attempt_{"[0-9]" * 5}.json')]
  return folder / f'attempt_{max(found, default=0) + 1:05d}.json'


def _read(path: pathlib.Path) -> JsonObject | None:
  """Returns a record, or None if it is damaged: a report must not stop a run."""
  try:
    if not path.is_file():  # Reading a FIFO would block.
      return None
    record = parsed(path.read_text())
    numbers = ('started', 'ended', 'first_step', 'last_step', 'lost_steps')
    return {
      **{k: _finite(record[k]) for k in numbers},
      'seconds': {k: _finite(record['seconds'][k]) for k in KINDS},
    }
  except (OSError, LookupError, ArithmeticError):
    return None
  except (ValueError, TypeError, AttributeError):  # The file holds something else.
    return None


def _finite(number: float) -> float:
  if not math.isfinite(number):
    raise ValueError(number)
  return float(number)


def _set_damaged_aside(folder: pathlib.Path) -> None:
  """Renames files that are not valid records, so that each is reported only once."""
  with contextlib.suppress(OSError):  # A file that cannot be renamed is left out of reports.
    if folder.exists() and not folder.is_dir():
      set_aside(folder, 'it is not a folder')
    for path in sorted(folder.glob('attempt_*.json')):
      if _read(path) is None:
        set_aside(path, 'it is not a record of an attempt')
