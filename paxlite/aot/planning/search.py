"""The search for the best candidate: estimates order them, and the compiler judges the first."""

import collections
import dataclasses
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from paxlite.aot.explanation_tables import size
from paxlite.aot.planning.estimate import Estimate, Estimator
from paxlite.aot.planning.space import Candidate, Space
from paxlite.aot.planning.verdicts import Store, Verdict
from paxlite.aot.planning.workers import Question
from paxlite.core.errors import UserError
from paxlite.experiments.base import Experiment, full_name
from paxlite.experiments.language_model import LanguageModel

_NEAR = 1.2  # a corrected estimate of memory may be too high by this factor
_ALIKE = 0.02  # each candidate with the same mesh and policy waits as if slower by this share
Estimated = tuple[Candidate, Estimate]


class Judged(NamedTuple):
  """A candidate with its verdict."""

  candidate: Candidate
  estimate: Estimate
  verdict: Verdict
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
  """The result of a search; `judged` is in the order of the verdicts."""

  space: Space
  considered: int = 0  # candidates that were estimated
  judged: list[Judged] = dataclasses.field(default_factory=list)
  interrupted: bool = False

  @property
  def best(self) -> list[Judged]:
    """The candidates that fit, the fastest a row first."""
    order = lambda j: (j.row_seconds, j.verdict.memory)
    return sorted((j for j in self.judged if j.fits), key=order)

  @property
  def ratio(self) -> float:
    """The memory that verdicts say, by what was estimated: the median."""
    ratios = [j.verdict.memory / j.estimate.memory for j in self.judged if j.verdict.memory]
    return statistics.median(ratios) if ratios else 1.0


class Pool(Protocol):
  """Judges candidates, `size` of them at a time; see workers.WorkerPool."""

  size: int

  def judge(self, asked: Sequence[Question]) -> Iterator[tuple[int, Verdict]]: ...


@dataclasses.dataclass
class Search:
  """Searches a space with a limited number of verdicts."""

  space: Space
  estimator: Estimator
  pool: Pool
  store: Store | None  # None: nothing is kept
  most: int
  say: Callable[[str], None]
  takes_first: bool = False  # whether the search ends with the first candidate that fits

  def run(self) -> Plan:
    """Searches until the limit of verdicts or Ctrl-C."""
    plan = Plan(self.space)
    try:
      waiting = self.estimated(plan)
      while len(plan.judged) < self.most and not (self.takes_first and plan.best):
        number = min(self.pool.size, self.most - len(plan.judged))
        if not (chosen := self._next(waiting, plan.ratio, number)):
          break
        self.ask(plan, chosen)
    except KeyboardInterrupt:
      plan.interrupted = True
    return plan

  def estimated(self, plan: Plan) -> list[Estimated]:
    """Returns all candidates with their estimates in the order in which to ask about them.

    The fastest a row is first. Alike ones are off by the same factor, and do not all come at once.
    """
    found = dict[object, Estimated]()
    for plan.considered, c in enumerate(self.space, 1):
      estimate = self.estimator.estimate(c)  # it is the same for policies that keep the same
      found.setdefault((c.layout, c.rows, c.microbatches, estimate), (c, estimate))
    self.say(f'{plan.considered:,} candidates are estimated')
    alike, order = collections.Counter[object](), list[tuple[float, float, int, Estimated]]()
    for i, one in enumerate(sorted(found.values(), key=_row_seconds)):
      kind = one[0].layout, one[0].values['CHECKPOINT_POLICY']
      order.append((_row_seconds(one) * (1 + _ALIKE * alike[kind]), one[1].memory, i, one))
      alike[kind] += 1
    return self._with_experts([one for *_, one in sorted(order)])

  def _with_experts(self, order: list[Estimated]) -> list[Estimated]:
    """Returns the order in which one with the mesh axis expert, and one without, are soon judged.

    What exchanging tokens takes beside gathering weights is estimated worst.
    """
    limit = self.space.machine.memory
    for has_axis in (False, True):
      alike = (x for x in order if x[0].layout.has_experts == has_axis and x[1].memory <= limit)
      first = next(alike, None)
      if first is not None and first not in order[: max(self.most // 4, 1)]:
        order = [*order[:1], first, *(one for one in order[1:] if one is not first)]
    return order

  def _next(
    self, waiting: list[Estimated], ratio: float, number: int
  ) -> list[tuple[Candidate, Estimate, LanguageModel]]:
    """Selects the fastest candidates that may fit, or those that need least if none may."""
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

  def ask(self, plan: Plan, chosen: Sequence[tuple[Candidate, Estimate, LanguageModel]]) -> None:
    """Records the verdicts about candidates, with their estimates and experiments."""
    for i, verdict in self._verdicts([experiment for *_, experiment in chosen]):
      candidate, estimate, _ = chosen[i]
      judged = Judged(candidate, estimate, verdict, verdict.fits(self.space.machine.memory))
      plan.judged.append(judged)
      self.say(f'[{len(plan.judged)} of at most {self.most}] {candidate}: {judged}')

  def _verdicts(self, experiments: Sequence[LanguageModel]) -> Iterator[tuple[int, Verdict]]:
    """Yields (position, verdict) of experiments: kept ones first, then those of the workers."""
    asked, memory = [], self.space.machine.memory
    for i, experiment in enumerate(experiments):
      kept = None if self.store is None else self.store.get(experiment.values())
      # one that was too large for the memory then was not run
      if kept is not None and (kept.seconds or kept.memory > memory):
        yield i, kept
      else:
        asked.append(i)
    questions = [(full_name(type(e)), stated(e), memory) for e in (experiments[i] for i in asked)]
    for position, verdict in self.pool.judge(questions):
      i = asked[position]
      if self.store and not verdict.error:
        self.store.write(experiments[i].values(), verdict)
      yield i, verdict


def stated(experiment: Experiment) -> dict[str, object]:
  """Returns the values that an experiment does not derive from others."""
  return {name: value for name, value in vars(experiment).items() if name.isupper()}


def _row_seconds(one: Estimated) -> float:
  return one[1].seconds / one[0].rows
