"""The search for the best candidate: estimates order them, and the compiler judges the first."""

import collections
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from paxlite.aot.explanation_tables import size
from paxlite.aot.planning.estimate import Estimate, Estimator
from paxlite.aot.planning.space import OFF_HOST, Candidate, Space
from paxlite.aot.planning.verdicts import Store, Verdict
from paxlite.aot.planning.workers import Question, WorkerPool
from paxlite.core.errors import UserError
from paxlite.experiments.base import Experiment, full_name
from paxlite.experiments.language_model import LanguageModel

_NEAR = 1.2  # a corrected estimate of memory may be too high by this factor
_ENOUGH = 0.004  # the share of a step that the memory of the host must gain to be used
_AGAIN = 3  # of the best that were measured: they are measured once more
_ALIKE = 0.02  # each candidate with the same mesh and policy waits as if slower by this share
# the search may end after so many verdicts, if no other candidate can be faster than the best one,
# though it gained on its estimate by this factor more than the one that has gained most
_LEAST, _GAIN = 8, 0.9
Estimated = tuple[Candidate, Estimate]


class Judged(NamedTuple):
  """A candidate with its verdict, and the bytes that were predicted for it just before."""

  candidate: Candidate
  estimate: Estimate
  verdict: Verdict
  predicted: float
  fits: bool

  @property
  def row_seconds(self) -> float:
    """Seconds of a step for each row of its batch."""
    return self.verdict.seconds / self.candidate.rows

  def __str__(self) -> str:
    v = self.verdict
    if v.error:
      return f'failed: {v.error[:120]}'
    memory = size(v.memory)
    return f'{memory}, {v.seconds:.4g} s' if self.fits else f'{memory}, does not fit'


@dataclasses.dataclass
class Plan:
  """What a search has found; `judged` is in the order in which the verdicts came."""

  space: Space
  considered: int = 0  # candidates that were estimated
  estimating: float = 0.0  # seconds that this took
  judged: list[Judged] = dataclasses.field(default_factory=list)
  spent: float = 0.0  # seconds of the whole search
  interrupted: bool = False

  @property
  def best(self) -> list[Judged]:
    """The candidates that fit, the fastest a row first.

    One that uses the host's memory comes before one that does not only if it is faster by more than
    _ENOUGH.
    """
    order = lambda j: (j.row_seconds * (1 + _ENOUGH * j.candidate.on_host), j.verdict.memory)
    return sorted((j for j in self.judged if j.fits), key=order)

  @property
  def ratio(self) -> float:
    """The memory that verdicts say, by what was estimated: the median."""
    ratios = [j.verdict.memory / j.estimate.memory for j in self.judged if j.verdict.memory]
    return statistics.median(ratios) if ratios else 1.0


@dataclasses.dataclass
class Search:
  """Searches a space by at most so many verdicts, and those about the best without the host."""

  space: Space
  estimator: Estimator
  pool: WorkerPool
  store: Store
  most: int
  say: Callable[[str], None]

  def run(self) -> Plan:
    """Searches until so many are judged, or the user presses Ctrl-C."""
    begun, plan = time.monotonic(), Plan(self.space)
    try:
      waiting = self.estimated(plan)
      while len(plan.judged) < self.most:
        number = min(self.pool.size, self.most - len(plan.judged))
        chosen = [] if self._is_over(plan, waiting) else self._next(waiting, plan.ratio, number)
        if not chosen:
          break
        self.ask(plan, chosen, begun)
      self._judge_on_devices(plan, waiting, begun)
      if self.space.machine.measured:
        self._measure_again(plan)
    except KeyboardInterrupt:
      plan.interrupted = True
    plan.spent = time.monotonic() - begun
    return plan

  def estimated(self, plan: Plan) -> list[Estimated]:
    """Returns all candidates with their estimates in the order in which to ask about them.

    The fastest a row is first. Alike ones are off by the same factor, and do not all come at once.
    """
    begun = time.monotonic()
    found = dict[tuple[object, ...], Estimated]()
    for plan.considered, candidate in enumerate(self.space, 1):
      estimate = self.estimator.estimate(candidate)
      if plan.considered % 5000 == 0:
        self.say(f'{plan.considered:,} candidates estimated …')
      # an attribute without any effect, such as blocks where a fused kernel computes attention
      same = candidate.layout, candidate.rows, candidate.microbatches, estimate
      found.setdefault(same, (candidate, estimate))
    plan.estimating = time.monotonic() - begun
    self.say(f'{plan.considered:,} candidates estimated in {plan.estimating:.0f} s')
    alike, order = collections.Counter[object](), list[tuple[float, float, int, Estimated]]()
    for i, one in enumerate(sorted(found.values(), key=_row_seconds)):
      kind = one[0].layout, one[0].values.get('CHECKPOINT_POLICY')
      order.append((_row_seconds(one) * (1 + _ALIKE * alike[kind]), one[1].memory, i, one))
      alike[kind] += 1
    return [one for *_, one in sorted(order)]

  def _is_over(self, plan: Plan, waiting: list[Estimated]) -> bool:
    gains = [j.verdict.seconds / j.estimate.seconds for j in plan.judged if j.verdict.seconds]
    if not plan.best or len(plan.judged) < _LEAST:
      return False
    least = min(map(_row_seconds, waiting), default=math.inf)
    return least * min(gains) * _GAIN >= plan.best[0].row_seconds

  def _next(
    self, waiting: list[Estimated], ratio: float, number: int
  ) -> list[tuple[Candidate, Estimate, LanguageModel]]:
    """Takes the fastest candidates that may fit, or the ones that need least if none may."""
    limit = _NEAR * self.space.machine.memory
    may_fit = lambda x: ratio * x[1].memory <= limit
    order = [*filter(may_fit, waiting)] or sorted(waiting, key=lambda x: x[1].memory)
    found = []
    for one in order:
      waiting.remove(one)
      try:
        found.append((*one, one[0].of(self.space.experiment)))
      except UserError:
        continue
      if len(found) == number:
        break
    return found

  def _judge_on_devices(self, plan: Plan, waiting: list[Estimated], begun: float) -> None:
    """Asks about the best candidate with everything on the devices instead, while one may fit."""
    while plan.best and plan.best[0].candidate.on_host:
      best = plan.best[0].candidate
      like = dataclasses.replace(best, values={**best.values, **OFF_HOST})
      same = [x for x in waiting if x[0] == like]
      limit = _NEAR * self.space.machine.memory
      if not same or plan.ratio * same[0][1].memory > limit:
        return
      waiting.remove(same[0])
      self.ask(plan, self._next(same, 0.0, 1), begun)

  def ask(
    self, plan: Plan, chosen: Sequence[tuple[Candidate, Estimate, LanguageModel]], begun: float
  ) -> None:
    """Takes the verdicts about candidates, with their estimates and experiments."""
    ratio, memory = plan.ratio, self.space.machine.memory
    for i, verdict in self._verdicts([experiment for *_, experiment in chosen]):
      candidate, estimate, _ = chosen[i]
      predicted, fits = ratio * estimate.memory, verdict.fits(memory)
      plan.judged.append(judged := Judged(candidate, estimate, verdict, predicted, fits))
      most = max(self.most, len(plan.judged))
      spent = statistics.mean(j.verdict.spent for j in plan.judged)
      left = (most - len(plan.judged)) * spent / self.pool.size
      self.say(
        f'[{len(plan.judged)} of at most {most}, {time.monotonic() - begun:.0f} s, '
        f'at most {left:.0f} s left] {candidate}: {judged}'
      )

  def _verdicts(self, experiments: Sequence[LanguageModel]) -> Iterator[tuple[int, Verdict]]:
    """Yields (position, verdict) of experiments: kept ones first, then those of the workers."""
    asked, memory = [], self.space.machine.memory
    for i, experiment in enumerate(experiments):
      kept = self.store.get(experiment.values())
      # one that was too large for the memory then was not run
      if kept is not None and (kept.seconds or kept.memory > memory):
        yield i, kept._replace(spent=0.0)
      else:
        asked.append(i)
    questions = [self._question(experiments[i]) for i in asked]
    for position, verdict in self.pool.judge(questions):
      i = asked[position]
      if not verdict.error:
        self.store.write(experiments[i].values(), verdict._asdict())
      yield i, verdict

  def _question(self, e: LanguageModel) -> Question:
    """Returns what a worker is asked about an experiment."""
    return full_name(type(e)), stated(e), self.space.machine.memory

  def _measure_again(self, plan: Plan) -> None:
    """Measures the best once more, in turn, because the machine may have been busy before."""
    best = plan.best[:_AGAIN]
    self.say(f'The {len(best)} best are measured once more')
    made = [j.candidate.of(self.space.experiment) for j in best]
    for position, verdict in self.pool.judge([self._question(e) for e in made]):
      old = best[position]
      if not verdict.error and verdict.seconds < old.verdict.seconds:
        plan.judged[plan.judged.index(old)] = old._replace(verdict=verdict)


def stated(experiment: Experiment) -> dict[str, object]:
  """Returns the values that an experiment does not derive from others."""
  return {name: value for name, value in vars(experiment).items() if name.isupper()}


def _row_seconds(one: Estimated) -> float:
  return one[1].seconds / one[0].rows
