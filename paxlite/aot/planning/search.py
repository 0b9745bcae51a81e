"""The search for the best candidate: estimates prune, and the verdicts about some correct them."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from paxlite.aot.planning import choices
from paxlite.aot.planning.candidates import Candidate, Space
from paxlite.aot.planning.correction import Correction
from paxlite.aot.planning.estimate import Estimate, Estimator
from paxlite.aot.planning.features import Features
from paxlite.aot.planning.store import Store, Verdict
from paxlite.aot.planning.worker_pool import WorkerPool
from paxlite.core.errors import UserError
from paxlite.experiments.base import Experiment, full_name
from paxlite.experiments.language_model import LanguageModel

_MOST = 3000  # candidates that are left after pruning
_ROOM = 1.7  # an estimate of memory may be too high by this factor
_NEAR = 1.2  # a corrected estimate of memory may be too high by this factor
_ENOUGH = 0.004  # the search ends when less than this share of a step can be expected to be won
_NOISE_HERE = 0.03  # of steps that are measured


@dataclasses.dataclass(frozen=True)
class Judged:
  """A candidate about which there is a verdict.

  Attributes:
    candidate: The candidate.
    estimate: What was estimated.
    verdict: What the compiler or a run says.
    foreseen: Bytes that were predicted just before, with all corrections so far.
    fits: Whether it fits.
  """

  candidate: Candidate
  estimate: Estimate
  verdict: Verdict
  foreseen: float
  fits: bool

  @property
  def row_seconds(self) -> float:
    """Seconds of a step for each row of its batch."""
    return self.verdict.seconds / self.candidate.rows

  @property
  def off(self) -> float:
    """The relative error of the predicted memory."""
    return abs(self.foreseen / self.verdict.memory - 1) if self.verdict.memory else 0.0


@dataclasses.dataclass(frozen=True)
class Point:
  """A candidate with its memory and time, predicted or judged."""

  candidate: Candidate
  memory: float
  row_seconds: float
  judged: bool


@dataclasses.dataclass
class Plan:
  """What a search has found.

  Attributes:
    space: What was searched.
    considered: Number of candidates that were estimated.
    estimating: Seconds that this took.
    judged: The verdicts, in the order in which they came.
    front: The Pareto front of memory and time for each row, least memory first.
    least: The candidate that is estimated to need least memory, with its estimate.
    spent: Seconds of the whole search.
    interrupted: Whether the user ended it.
  """

  space: Space
  considered: int = 0
  estimating: float = 0.0
  judged: list[Judged] = dataclasses.field(default_factory=list)
  front: list[Point] = dataclasses.field(default_factory=list)
  least: tuple[Candidate, Estimate] | None = None
  spent: float = 0.0
  interrupted: bool = False

  @property
  def best(self) -> list[Judged]:
    """The candidates that fit, the fastest a row first.

    One that uses the host's memory comes before one that does not only if it is faster by more than
    _ENOUGH.
    """

    def order(j: Judged) -> tuple[float, float]:
      is_on_host = any(map(j.candidate.values.get, choices.ON_HOST))
      return j.row_seconds * (1 + _ENOUGH * is_on_host), j.verdict.memory

    return sorted((j for j in self.judged if j.fits), key=order)


class Search:
  """Searches a space."""

  def __init__(
    self,
    space: Space,
    estimator: Estimator,
    pool: WorkerPool,
    store: Store,
    budget: int,
    workers: int,
    say: Callable[[str], None],
  ):
    """Estimates nothing yet.

    Args:
      space: What is searched.
      estimator: Its estimates.
      pool: The processes that judge.
      store: What was judged earlier.
      budget: The most verdicts to ask for, besides those of `_judge_on_devices`.
      workers: Number of verdicts to ask for at a time.
      say: Prints a line of progress.
    """
    self.plan = Plan(space)
    self._estimator = estimator
    self._pool = pool
    self._store = store
    self._budget = budget
    self._workers = workers
    self._say = say
    self._candidates: list[Candidate] = []
    self._estimates: list[Estimate] = []
    self._dropped: set[int] = set()
    self._verdicts: dict[int, Judged] = {}
    self._valid: dict[int, LanguageModel] = {}
    self._spent: list[float] = []

  def everything(self) -> Plan:
    """Asks for a verdict about every candidate, to know the best of all."""
    self._estimate()
    begun = time.monotonic()
    for i, candidate in enumerate(self._candidates):
      self._valid[i] = candidate.of(self.plan.space.experiment)
    self._ask(list(self._valid), begun)
    return self.plan

  def corrected(self) -> list[tuple[Candidate, float]]:
    """Returns the candidates without a verdict, with the bytes that are predicted for them."""
    memory = self._predicted()[0]
    others = [i for i in range(len(self._candidates)) if i not in self._verdicts]
    return [(self._candidates[i], float(np.exp(memory[i]))) for i in others]

  def run(self) -> Plan:
    """Searches until no gain is expected, the budget is spent, or the user presses Ctrl-C."""
    begun = time.monotonic()
    plan = self.plan
    try:
      self._estimate()
      self._judge(begun)
      self._judge_on_devices(begun)
      if plan.space.machine.measured:
        self._again()
    except KeyboardInterrupt:
      plan.interrupted = True
    if plan.judged:
      plan.front = self._front()
    plan.spent = time.monotonic() - begun
    return plan

  def _estimate(self) -> None:
    """Estimates all candidates and keeps those that may be among the best."""
    plan, limit = self.plan, self.plan.space.machine.memory
    begun = time.monotonic()
    found: dict[tuple[object, ...], tuple[Candidate, Estimate]] = {}
    for candidate in plan.space:
      estimate = self._estimator.estimate(candidate)
      plan.considered += 1
      if plan.least is None or estimate.memory < plan.least[1].memory:
        plan.least = candidate, estimate
      if plan.considered % 5000 == 0:
        self._say(f'{plan.considered:,} candidates estimated …')
      # an attribute without any effect, such as blocks where a fused kernel computes attention
      same = candidate.layout, candidate.rows, candidate.microbatches, estimate
      found.setdefault(same, (candidate, estimate))
    plan.estimating = time.monotonic() - begun
    self._say(f'{plan.considered:,} candidates estimated in {plan.estimating:.0f} s')
    by_time = sorted(found.values(), key=lambda x: x[1].seconds / x[0].rows)
    possible = [x for x in by_time if x[1].memory < _ROOM * limit][:_MOST]
    lean = sorted(found.values(), key=lambda x: x[1].memory)[: _MOST // 10]
    kept = {id(x[1]): x for x in (*possible, *lean)}
    self._candidates = [c for c, _ in kept.values()]
    self._estimates = [e for _, e in kept.values()]
    self._features = Features(self._candidates)
    self._numbers = self._features.of(self._candidates)
    self._log_memory = np.log([e.memory for e in self._estimates])
    pairs = zip(self._candidates, self._estimates, strict=True)
    self._of_memory = np.array([_parts_of_memory(c, e) for c, e in pairs])
    self._of_seconds = np.array(
      [_shares([e.products, e.traffic], e.seconds) for e in self._estimates]
    )
    rows = np.array([c.rows for c in self._candidates])
    self._log_rows = np.log(rows)
    self._log_seconds = np.log([e.seconds for e in self._estimates]) - self._log_rows

  def _judge(self, begun: float) -> None:
    """Asks for verdicts about the most promising candidates until no gain is expected."""
    while len(self._verdicts) < self._budget:
      chosen = self._chosen(min(self._workers, self._budget - len(self._verdicts)))
      if not chosen:
        return
      self._ask(chosen, begun)

  def _judge_on_devices(self, begun: float) -> None:
    """Asks for a verdict about the best candidate with everything on the devices instead."""
    while best := self.plan.best:
      found = self._on_devices(best[0].candidate)
      if found is None or found in self._verdicts or found in self._dropped:
        return
      if self._predicted()[0][found] > math.log(self.plan.space.machine.memory * _NEAR):
        return
      try:
        self._valid[found] = self._candidates[found].of(self.plan.space.experiment)
      except UserError:
        return
      self._ask([found], begun)

  def _on_devices(self, candidate: Candidate) -> int | None:
    """Returns the number of a candidate that differs only by keeping everything on the devices."""
    values = {**candidate.values, **choices.OFF_HOST}
    if values == candidate.values:
      return None
    like = dataclasses.replace(candidate, values=values)
    return next((i for i, c in enumerate(self._candidates) if c == like), None)

  def _ask(self, chosen: Sequence[int], begun: float) -> None:
    """Takes the verdicts about some candidates."""
    foreseen = self._predicted()[0]
    for i, verdict in self._verdicts_of(chosen):
      fits = verdict.fits(self.plan.space.machine.memory)
      judged = Judged(
        self._candidates[i], self._estimates[i], verdict, float(np.exp(foreseen[i])), fits
      )
      self._verdicts[i] = judged
      self.plan.judged.append(judged)
      self._spent.append(verdict.spent)
      most = max(self._budget, len(self._verdicts))
      left = (most - len(self._verdicts)) * float(np.mean(self._spent)) / self._workers
      self._say(
        f'[{len(self._verdicts)} of at most {most}, {time.monotonic() - begun:.0f} s, '
        f'at most {left:.0f} s left] {judged.candidate}: {said(judged)}'
      )

  def _verdicts_of(self, chosen: Sequence[int]) -> Iterator[tuple[int, Verdict]]:
    """Yields the verdicts about candidates: kept ones first, then those of the workers."""
    asked = []
    for i in chosen:
      experiment = self._valid[i]
      kept = self._store.get(experiment.values())
      # one that was too large for the memory then was not run
      if kept is not None and (kept.seconds or kept.memory > self.plan.space.machine.memory):
        yield i, dataclasses.replace(kept, spent=0.0)
      else:
        asked.append(i)
    questions = [self._question(self._valid[i]) for i in asked]
    for position, verdict in self._pool.judge(questions):
      i = asked[position]
      if not verdict.error:
        self._store.put(self._valid[i].values(), verdict)
      yield i, verdict

  def _question(self, experiment: Experiment) -> dict[str, object]:
    """Returns what a worker is asked about an experiment."""
    return {
      'experiment': full_name(type(experiment)),
      'values': stated(experiment),
      'memory': self.plan.space.machine.memory,
    }

  def _chosen(self, number: int) -> list[int]:
    """Returns the most promising candidates by all verdicts; none if the expected gain is small."""
    self._valid = {}
    chosen: list[int] = []
    while len(chosen) < number:
      gain = self._gain(chosen)
      gain[[*self._verdicts, *chosen, *self._dropped]] = -1
      i = int(gain.argmax())
      if gain[i] < 0 or (gain[i] < _ENOUGH and self._verdicts and self.plan.best):
        return chosen
      try:
        self._valid[i] = self._candidates[i].of(self.plan.space.experiment)
      except UserError:
        self._dropped.add(i)
        continue
      chosen.append(i)
    return chosen

  def _gain(self, pending: Sequence[int]) -> np.ndarray:
    """Returns the expected gain of each candidate in steps, times the chance that it fits."""
    limit = math.log(self.plan.space.machine.memory)
    memory, memory_error, seconds, error = self._predicted(pending)
    fits = _probability((limit - memory) / memory_error)
    best = self.plan.best
    if best:
      known = math.log(best[0].row_seconds)
    else:
      likely = seconds[fits > 0.5]
      known = float(likely.min()) + 0.3 if len(likely) else float(seconds.min()) + 1.0
    z = (known - seconds) / error
    gain = error * (z * _probability(z) + np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi))
    if not best:  # something has to fit first
      return fits * gain + 1e-9 * fits
    return fits * gain

  def _predicted(
    self, pending: Sequence[int] = ()
  ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns (log bytes, its error, log seconds a row, its error) of all candidates, corrected.

    Args:
      pending: Candidates that are being judged; their predictions are taken as verdicts.
    """
    known = [i for i, j in self._verdicts.items() if j.verdict.memory and not j.verdict.error]
    timed = [i for i in known if self._verdicts[i].verdict.seconds]
    noise = _NOISE_HERE if self.plan.space.machine.measured else 0.002
    found: list[np.ndarray] = []
    for indices, log_estimate, parts, truth in (
      (known, self._log_memory, self._of_memory, lambda v, i: math.log(v.memory)),
      (
        timed,
        self._log_seconds,
        self._of_seconds,
        lambda v, i: math.log(v.seconds) - self._log_rows[i],
      ),
    ):
      correction = Correction(noise)
      ratios = [truth(self._verdicts[i].verdict, i) - log_estimate[i] for i in indices]
      if indices:
        correction.learn(self._numbers[indices], parts[indices], ratios, self._features.groups)
      mean, error = correction.predict(self._numbers, parts)
      if pending:
        both = [*indices, *pending]
        taken = [*ratios, *mean[list(pending)]]
        correction.learn(self._numbers[both], parts[both], taken, self._features.groups)
        mean, error = correction.predict(self._numbers, parts)
      found += [log_estimate + mean, error]
    memory, memory_error, seconds, error = found
    return memory, memory_error, seconds, error

  def _again(self) -> None:
    """Measures the three best once more, in turn, because the machine may have been busy before."""
    best = self.plan.best[:3]
    left = len(best) * max(self._spent, default=0.0)
    about = f', in at most {left:.0f} s' if left >= 1 else ''
    self._say(f'The {len(best)} best are measured once more{about}')
    questions = [self._question(j.candidate.of(self.plan.space.experiment)) for j in best]
    for position, verdict in self._pool.judge(questions):
      old = best[position]
      if not verdict.error and verdict.seconds < old.verdict.seconds:
        at = self.plan.judged.index(old)
        self.plan.judged[at] = dataclasses.replace(old, verdict=verdict)

  def _front(self) -> list[Point]:
    """Returns the Pareto front of memory and time a row, of verdicts and corrected estimates."""
    limit = self.plan.space.machine.memory
    memory, _, seconds, _ = self._predicted()
    points = [
      Point(j.candidate, j.verdict.memory, j.row_seconds, True) for j in self.plan.judged if j.fits
    ]
    for i, candidate in enumerate(self._candidates):
      if i not in self._verdicts and i not in self._dropped and np.exp(memory[i]) <= limit:
        point = Point(candidate, float(np.exp(memory[i])), float(np.exp(seconds[i])), False)
        points.append(point)
    return pareto(points)


def _parts_of_memory(candidate: Candidate, estimate: Estimate) -> list[float]:
  """Returns the shares of the parts of a device's memory that have errors of their own."""
  e = estimate
  whole = e.logits if choices.loss_chunks(candidate.values) == 1 else 0.0
  return _shares([e.state, e.saved, whole, e.logits - whole], e.memory)


def _shares(parts: Sequence[float], total: float) -> list[float]:
  """Returns the shares of parts in a total, and the share of the rest."""
  return [*(part / total for part in parts), 1 - sum(parts) / total]


def pareto(points: Sequence[Point]) -> list[Point]:
  """Returns the points that no other beats in memory and in time, least memory first."""
  found: list[Point] = []
  for point in sorted(points, key=lambda p: (p.memory, p.row_seconds, not p.judged)):
    if not found or point.row_seconds < found[-1].row_seconds * 0.99:
      found.append(point)
  return found


def stated(experiment: Experiment) -> dict[str, object]:
  """Returns the values that an experiment does not derive from others."""
  return {name: value for name, value in vars(experiment).items() if name.isupper()}


def said(judged: Judged) -> str:
  """Returns a verdict as a part of a line."""
  v = judged.verdict
  if v.error:
    return f'failed: {v.error[:120]}'
  memory = size(v.memory)
  if not judged.fits:
    return f'{memory}, does not fit' if v.memory else 'does not fit'
  return f'{memory}, {v.seconds:.4g} s'


def size(count: float) -> str:
  """Returns a number of bytes as text: '1.25 GiB', '80.1 MiB'."""
  return f'{count / 2**30:.2f} GiB' if count >= 1 << 30 else f'{count / 2**20:.1f} MiB'


def _probability(z: np.ndarray) -> np.ndarray:
  """Returns the normal distribution's probability of less than z, to 1e-4."""
  z = np.clip(z, -8, 8)
  return 1 / (1 + np.exp(-1.5976 * z - 0.07056 * z**3))
