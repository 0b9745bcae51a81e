"""Starts a run again after each of its ends, as a supervisor does, and counts what was lost."""

import collections
import dataclasses
import random
import re
import signal
import time
from collections.abc import Callable

from benchmarks.chaos import faults
from benchmarks.chaos.faults import Draws, Event, Plan
from benchmarks.chaos.outcomes import Outcome
from benchmarks.chaos.places import Run, Started
from benchmarks.chaos.starts import LEAVES, End, ended, phase, watch
from benchmarks.chaos.table import Table

MOST_STARTS = 80


@dataclasses.dataclass
class Timing:
  """How long a run takes that is not disturbed.

  Attributes:
    seconds: Until its end.
    first: The share of that until its first checkpoint.
  """

  seconds: float
  first: float

  def moment(self, rng: random.Random, left: float) -> float:
    """Draws a moment of a start that has this share of the steps to do.

    Half of the moments are at most a little after the time of a first checkpoint.
    """
    whole = self.seconds * (self.first + (1 - self.first) * left)
    return rng.uniform(0, rng.choice((min(1.5 * self.first * self.seconds, whole), whole)))

  def early(self, rng: random.Random) -> float:
    """Draws a moment that hardly any start outlives."""
    return rng.uniform(0, self.first * self.seconds / 2)

  def note(self, seconds: float) -> None:
    """Follows the speed of the machine, which others use too, and the cache of programs."""
    self.seconds = (self.seconds + seconds) / 2


class Supervisor:
  """Brings one run to its end.

  Args:
    run: The run.
    rng: Where draws come from.
    draws: The faults.
    timing: How long an undisturbed run takes.
    missing: Returns the kinds of faults from which is to be drawn; None: from all, []: from none.
    table: Where everything is counted.
  """

  def __init__(
    self, run: Run, rng: random.Random, draws: Draws, timing: Timing,
    missing: Callable[[], list[str] | None], table: Table,
  ):  # fmt: skip
    self._run = run
    self._rng = rng
    self._draws = draws
    self._timing = timing
    self._missing = missing
    self._table = table
    self._machine = rng.choice(run.place.machines)
    self._reached = 0  # the last step that was computed
    self._since: list[str] = []  # kinds of faults since the run has last continued
    self._all: set[str] = set()  # kinds of faults of this run
    self._damaged: dict[str, set[int]] = collections.defaultdict(set)  # steps, by where they are
    self._unreported: tuple[str, int] | None = None  # machine and step of a damaged checkpoint
    self._stopped: tuple[Started, Plan] | None = None  # a start that was left stopped

  def bring_to_end(self, expected: Outcome) -> None:
    """Starts the run until it is complete, and compares it with an undisturbed one."""
    while self._run.starts < MOST_STARTS:
      if self._start().is_complete:
        break
    else:
      # a run that did all of its steps, and never ended with 0, has lost one, too
      self._table.lose({'steps': max(1, self._run.steps - self._reached)}, self._all)
      self._end_stopped(took_over=False)
      return
    self._end_stopped(took_over=True)
    lost = expected.lost(Outcome.of(self._run.folder(self._machine), self._run.steps))
    if not self._run.is_copied(self._machine):
      lost['checkpoints'] += 1
    self._table.lose(lost, self._all)
    self._table.end(self._run.place.name)

  def _start(self) -> End:
    run = self._run
    last, self._machine = self._machine, self._next_machine()
    own = self._local(self._machine) if last == self._machine else set()
    stored = set(run.stored())
    missing = self._missing()
    if missing is not None:
      missing = [kind for kind in missing if run.place.name in faults.KINDS[kind]]
    drawn = [] if missing == [] else self._draws.of_place(run.place.name, missing or ())
    kinds = self._damage(drawn, own, stored)
    good = (own - self._damaged[self._machine]) | (stored - self._damaged['bucket'])
    left = 1 - max(good, default=0) / run.steps
    if missing is None:
      moment = lambda: self._timing.moment(self._rng, left)
    else:
      moment = lambda: self._timing.early(self._rng)
    plan = faults.plan(run, self._machine, kinds, sorted(good), self._rng, moment)
    plan.happened += [kind for kind in kinds if kind in faults.AT_REST]
    if self._stopped is not None:
      old = self._stopped[0]
      plan.events.append(Event(self._rng.uniform(8, 20), lambda _: old.signal(signal.SIGCONT)))
      plan.events.sort(key=lambda event: event.seconds)
    rivals = self._stopped is not None
    began = time.monotonic()
    started = run.start(self._machine, plan.flags, plan.environment)
    hangs = watch(started, plan)
    seconds = time.monotonic() - began
    if not plan.is_abandoned:
      faults.repair(run)
    plan.note_flip(started.printed)
    end = ended(run, started, plan, hangs, plan.happened, rivals)
    if end.is_complete and end.continued == 0:
      self._timing.note(seconds)
    self._all |= set(plan.happened)
    if plan.is_abandoned:
      self._stopped = started, plan
      faults.repair(run)
    elif rivals:
      self._end_stopped(took_over=end.continued is not None)
    self._judge(plan, end, good)
    return end

  def _judge(self, plan: Plan, end: End, good: set[int]) -> None:
    """Counts what one start has lost and said."""
    lost = end.lost
    again = None
    if 'damaged' in end.printed:
      self._unreported = None
    if self._unreported is not None and end.continued is not None:
      if self._unreported[0] == self._machine:
        print(f'!!! the run did not say that step {self._unreported[1]} is damaged', flush=True)
        lost['unclear errors'] += 1
      self._unreported = None
    if end.continued is not None:
      newest = max(good, default=0)
      if end.continued < newest:
        print(f'!!! continued from {end.continued}, not from {newest}', flush=True)
        lost['checkpoints'] += 1
      again = max(0, self._reached - end.continued)
      self._reached = end.continued
      for where, steps in self._damaged.items():
        first = end.continued + (where != self._machine)  # here it was copied again
        steps -= {step for step in steps if step >= first}
    self._reached = max(self._reached, self._run.last_step())
    if plan.flip is not None and 1 in end.codes and plan.names_flip(end.printed):
      self._doubt(end)
    at_rest = [kind for kind in plan.happened if kind in faults.AT_REST]
    before = self._since + at_rest
    self._table.add(self._run.place.name, plan.happened, end.said, before, again, lost)
    if 'SIGKILL' in plan.happened and -signal.SIGKILL in end.codes:
      self._table.phases[phase(end.printed, self._run, self._machine)] += 1
      self._table.during_a_copy += self._run.is_being_copied(self._machine)
    self._since = [] if again is not None else before
    self._since += [kind for kind in plan.happened if kind not in at_rest]
    what = ', '.join(plan.happened) or 'no fault'
    print(
      f'{self._run.parent.name} {self._run.place.name} start {self._run.starts}: {what}; '
      f'from {end.continued}, now {self._reached}; {"; ".join(end.said)}',
      flush=True,
    )

  def _next_machine(self) -> str:
    if self._stopped is None:
      return self._rng.choice(self._run.place.machines)
    return next(m for m in self._run.place.machines if m != self._machine)

  def _local(self, machine: str) -> set[int]:
    return set(self._run.local(machine))

  def _damage(self, kinds: list[str], own: set[int], stored: set[int]) -> list[str]:
    """Flips bits of files, where another checkpoint is left; returns the kinds that remain."""
    run, machine = self._run, self._machine
    left = []
    for kind in kinds:
      if kind == 'bit of a checkpoint':
        good = own - self._damaged[machine]
        newest = max(own, default=0)
        if newest not in good or len(good) < 2:
          continue
        faults.flip_file(run, machine, newest, self._rng)
        self._damaged[machine].add(newest)
        self._unreported = machine, newest
      elif kind == 'bit of a copy in the bucket':
        good = stored - self._damaged['bucket']
        newest = max(stored, default=0)
        if newest not in good or len(good) < 2:
          continue
        faults.flip_object(run, newest, self._rng)
        self._damaged['bucket'].add(newest)
        if newest not in self._local(machine):
          self._unreported = machine, newest
      elif kind == 'SIGSTOP, another machine goes on' and self._stopped is not None:
        continue
      left.append(kind)
    return left

  def _doubt(self, end: End) -> None:
    """Moves checkpoints aside that may be wrong, as the message about a lost bit says."""
    found = re.search(r'Step ([\d,]+) was verified, and checkpoints', end.printed)
    keep = int(found[1].replace(',', '')) if found else end.continued or 0
    for step in self._local(self._machine):
      if step > keep:
        path = self._run.checkpoint(self._machine, step)
        path.rename(path.with_name(f'doubted_{path.name}'))

  def _end_stopped(self, took_over: bool) -> None:
    """Waits for the start that was left stopped: it must leave if another one took over."""
    if self._stopped is None:
      return
    started, plan = self._stopped
    self._stopped = None
    started.signal(signal.SIGCONT)
    until = time.monotonic() + LEAVES
    while started.is_running and time.monotonic() < until:
      time.sleep(0.1)
    lost: dict[str, int] = {}
    if started.is_running:
      started.signal(signal.SIGKILL)
      lost['hangs'] = int(took_over)
    (process,) = started.processes
    code = process.wait()
    line = started.last_lines()[0]
    if code not in (-signal.SIGKILL, 1, 2, 0, 75) or (code > 0 and ': ' not in line):
      lost['unclear errors'] = 1
    self._table.lose(lost, set(plan.happened))
    print(f'  the one that was stopped: {code} {line}', flush=True)
