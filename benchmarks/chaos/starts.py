"""Watches one start of a run, lets its faults happen, and says how it ended."""

import collections
import dataclasses
import re
import signal
import time
from collections.abc import Sequence

from benchmarks.chaos.faults import Plan
from benchmarks.chaos.places import Run, Started

HANG = 300.0  # seconds after the last fault, after which a start counts as a hang
LEAVES = 60.0  # the same after a process was lost
_POLL = 0.02
_CLEAR = 'stopped: ', 'error: ', 'interrupted: '
_KILLED, _STOPPED = -signal.SIGKILL, -signal.SIGTERM
# the exit codes that a fault explains, besides 0
_EXPLAINED = {
  'SIGKILL': {_KILLED},
  'lost process': {_KILLED, 75},
  'SIGTERM': {75, _STOPPED},
  'full disk': {1},
  'slow store': {1, 2},
  'broken store': {1, 2},
  'bit of the parameters': {1},
  'bit of the moments': {1},
  'bit of the batch': {1},
  'bit of the gradients': {1},
  'device that computes wrong': {1},
}


@dataclasses.dataclass
class End:
  """How a start ended.

  Attributes:
    codes: The exit code of each process; [] if it was left stopped.
    printed: What the processes printed.
    said: What the run said at its end, without the numbers.
    continued: The step from which it went on; None: it did not come so far.
    lost: What was lost: hangs and unclear errors.
  """

  codes: list[int]
  printed: str
  said: list[str]
  continued: int | None
  lost: collections.Counter[str]

  @property
  def is_complete(self) -> bool:
    return bool(self.codes) and not any(self.codes)


def watch(started: Started, plan: Plan) -> bool:
  """Lets the events of a plan happen until the processes have ended; returns whether they hang."""
  began, events, limit = time.monotonic(), list(plan.events), HANG
  last = began
  while started.is_running:
    now = time.monotonic()
    if events and now - began >= events[0].seconds:
      event = events[0]
      if event.needs_all and 'Devices:' not in started.printed and now - last < HANG:
        event.seconds = now - began + 0.2
        events.sort(key=lambda event: event.seconds)
      else:
        events.pop(0).act(started)
        last = now
        if event.kind is not None:
          plan.happened.append(event.kind)
        if event.kind == 'lost process':
          limit = LEAVES
        if plan.is_abandoned:
          return False
    elif not events and now - last > limit:
      started.signal(signal.SIGKILL)
      for process in started.processes:
        process.wait()
      return True
    time.sleep(_POLL)
  return False


def ended(
  run: Run, started: Started, plan: Plan, hangs: bool, explained: Sequence[str], rivals: bool
) -> End:
  """Returns how a start ended.

  Args:
    run: The run.
    started: Its processes, which have ended, or were left stopped.
    plan: What happened to them.
    hangs: Whether they had to be killed.
    explained: The faults that may be the reason for its end.
    rivals: Whether another start of the run was alive.
  """
  printed = started.printed
  lost: collections.Counter[str] = collections.Counter()
  codes = [] if plan.is_abandoned else [p.wait() for p in started.processes]
  lost['hangs'] += hangs
  allowed = {0}.union(*(_EXPLAINED.get(kind, set()) for kind in explained))
  if rivals:
    allowed |= {1, 2}
  if any(codes) and run.place.processes > 1 and allowed != {0}:
    allowed |= {75}
  problem = ''
  for code, line in zip(codes, started.last_lines(), strict=False):
    if code not in allowed and not hangs:
      problem = problem or f'the exit code {code} has no reason'
    if code > 0 and not line.startswith(_CLEAR):
      problem = problem or f'no clear error: {line}'
  if 'Traceback (most recent call last)' in printed or 'Fatal Python error' in printed:
    problem = problem or 'a traceback'
  if plan.flip is not None and plan.flip[0] in plan.happened:
    if 1 in codes and not plan.names_flip(printed):
      problem = problem or f'it does not name {plan.flip}'
    if not any(codes) or 75 in codes:
      lost['bits'] += 1
  lost['unclear errors'] += bool(problem)
  if problem:
    print(f'!!! {problem}: {started.logs[0]}', flush=True)
  names = {0: 'complete', _KILLED: 'killed', _STOPPED: 'ended by SIGTERM before it listened'}
  pairs = zip(codes, started.last_lines(), strict=False)
  said = [names.get(code) or _general(line, run) for code, line in pairs]
  if plan.is_abandoned:
    said = ['left stopped']
  return End(codes, printed, sorted(set(said)), _continued(printed), +lost)


def _general(line: str, run: Run) -> str:
  line = line.replace(str(run.parent), '…')
  line = re.sub(r'(gs|s3)://\S+?(?=[\s:,/]|$)\S*', 'BUCKET', line)
  line = re.sub(r'[0-9a-f]{12}', 'N', line)
  return re.sub(r'\d[\d,.]*\d|\d', 'N', line)[:160]


def _continued(printed: str) -> int | None:
  found = re.search(r'Continuing from the (?:checkpoint|local state) of step ([\d,]+)', printed)
  if found is None:
    found = re.search(r'Training is complete: step ([\d,]+)', printed)
  if found is not None:
    return int(found[1].replace(',', ''))
  return 0 if 'First step' in printed else None


def phase(printed: str, run: Run, machine: str) -> str:
  """Returns what a run did when it was killed."""
  if list((run.folder(machine) / 'checkpoints').glob('*tmp*')):
    return 'saving'
  for text, name in (
    ('First step', 'training'),
    ('Continuing', 'restored, compiling'),
    ('Backend', 'initializing or restoring'),
  ):
    if text in printed:
      return name
  return 'starting'
