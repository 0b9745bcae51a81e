"""Processes that judge candidates: they compile steps for a target, or run some on `here`."""

import contextlib
import multiprocessing
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING, Any

from paxlite.aot.planning.machine import Machine, here
from paxlite.aot.planning.verdicts import Verdict
from paxlite.core.json_text import Json

if TYPE_CHECKING:
  import jax

  from paxlite.aot.targets import Target
  from paxlite.experiments.base import Experiment
  from paxlite.training.train_state import TrainState

Question = tuple[str, Mapping[str, Json], float]  # a class, its values, and bytes of a device
_LEAST_STEPS, _MOST_STEPS = 3, 20
_SECONDS = 2.0  # the time for which steps are measured
_ON_HOST = '; host work is not counted'
_DEAD = 'the compiling process ended, possibly out of memory'


class WorkerPool:
  """Worker processes. Use it in a `with` statement, which ends them."""

  def __init__(
    self, target: str, calibration: str | None, size: int, environment: Mapping[str, str]
  ):
    """Starts nothing yet; target and calibration are those of targets.parse."""
    self.size = size
    self._about = target, calibration, dict(environment)
    self._pool: futures.ProcessPoolExecutor | None = None

  def __enter__(self) -> 'WorkerPool':
    return self

  def __exit__(self, *_: object) -> None:
    if self._pool is not None:
      self._pool.shutdown(wait=False, cancel_futures=True)
      for process in multiprocessing.active_children():
        process.kill()

  def _submit(self, function: Callable[..., Any], *arguments: object) -> 'futures.Future[Any]':
    if self._pool is None:
      os.environ['PYTHONSAFEPATH'] = '1'  # no json.py in the current folder must be imported
      spawn = multiprocessing.get_context('spawn')
      self._pool = futures.ProcessPoolExecutor(self.size, spawn, _begin, self._about)
    try:
      return self._pool.submit(function, *arguments)
    except BrokenProcessPool:
      self._pool = None
      return self._submit(function, *arguments)

  def machine(self) -> Machine:
    """Returns the machine whose devices the first process sees."""
    found: Machine = self._submit(here).result()
    return found

  def judge(self, asked: Sequence[Question]) -> Iterator[tuple[int, Verdict]]:
    """Yields (position in `asked`, verdict) of experiments, in the order in which they are judged.

    If a process dies while it judges, the verdict holds an error.
    """
    waiting = {self._submit(judged, *question): i for i, question in enumerate(asked)}
    lost = []
    for done in futures.as_completed(waiting):
      try:
        yield waiting[done], done.result()
      except BrokenProcessPool:
        lost.append(waiting[done])
    for i in lost:  # with one process, all others end; which one was it?
      verdict = Verdict(error=_DEAD)
      if len(lost) > 1:
        with contextlib.suppress(BrokenProcessPool):
          verdict = self._submit(judged, *asked[i]).result()
      yield i, verdict


def _begin(target: str, calibration: str | None, environment: Mapping[str, str]) -> None:
  """Begins a worker process, before JAX is imported; what libraries print is not shown."""
  global _worker
  os.environ.clear()
  os.environ.update(environment)
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  silent = os.open(os.devnull, os.O_WRONLY)
  os.dup2(silent, 1)
  os.dup2(silent, 2)
  from paxlite.aot import targets

  if target != 'here':
    targets.prepare_environment()
  import jax

  jax.config.update('jax_enable_compilation_cache', False)
  _worker = lambda: targets.parse(target, calibration)


_worker: 'Callable[[], Target]'  # returns the target of this process


def judged(name: str, values: Mapping[str, Json], memory: float) -> Verdict:
  """Returns the verdict about the experiment of a class with these values.

  A step is run only if it fits the memory of a device. What the compiler says holds for any.
  """

  def verdict() -> Verdict:
    target, experiment = _worker(), restored(name, values)
    is_here = target.chip is None
    return measured(experiment, memory) if is_here else compiled(experiment, target)

  return attempted(verdict)


def attempted(judge: Callable[[], Verdict]) -> Verdict:
  """Returns a verdict; a candidate that fails is not the end of the search."""
  try:
    return judge()
  except Exception as e:
    return Verdict(error=f'{type(e).__name__}: {(str(e).splitlines() or [""])[0]}')


def restored(name: str, values: Mapping[str, Json]) -> 'Experiment':
  """Returns the experiment of a class with these values, validated."""
  from paxlite.experiments.registry import find

  experiment = find(name).of_values(values)(**values)
  experiment.validate()
  return experiment


def compiled(experiment: 'Experiment', target: 'Target') -> Verdict:
  """Returns what the compiler for a target says of an experiment."""
  from paxlite.aot import analysis

  report = analysis.compile_step(experiment, target)
  if not report.arguments:
    return Verdict(memory=float(report.total), bound=report.verdict)
  if report.costs is None or (line := report.costs.roofline) is None:
    return Verdict(memory=float(report.total), error='the compiler cannot print its program')
  computes = '_xla_compute_type="host"' in (report.program or '')
  is_unknown = report.host and target.chip and not target.chip.host_bandwidth
  bound = line.bound + (_ON_HOST if computes or is_unknown else '')
  return Verdict(float(report.total), line.step, bound, host=float(report.host))


def measured(experiment: 'Experiment', memory: float) -> Verdict:
  """Runs some steps of an experiment on random tokens, if it fits; the median counts."""
  import jax

  step = LocalStep(experiment)
  if step.memory > memory:
    return Verdict(memory=step.memory, bound='does not fit')
  step.run()
  times: list[float] = []
  while len(times) < _LEAST_STEPS or (sum(times) < _SECONDS and len(times) < _MOST_STEPS):
    times.append(step.run())
  jax.clear_caches()
  return Verdict(step.memory, statistics.median(times), 'measured')


class LocalStep:
  """The compiled train step of an experiment on the devices that are here, and its state."""

  def __init__(self, experiment: 'Experiment'):
    """Compiles it; nothing is allocated before the first step."""
    from paxlite.aot import analysis
    from paxlite.compilation import compiled_step

    mesh = experiment.mesh()
    platform = mesh.devices.flat[0].platform
    self._task, self._vocabulary = analysis.sharded_task(experiment, mesh), experiment.vocab_size
    self._shapes = analysis.abstract_batch(experiment, mesh, [])
    lowered = self._task.lower_step(self._shapes)
    with self._task.compiling():
      self._step = compiled_step.compile_lowered(lowered, experiment.compiler_options(platform))
    self.memory = float(analysis.peak(self._step.memory_analysis(), platform))
    self._state: TrainState | None = None
    self._batch: dict[str, jax.Array] = {}

  def run(self) -> float:
    """Runs a step; returns its seconds."""
    import jax

    if self._state is None:
      self._state = self._task.new(lambda state: state, self._task.abstract)
      self._batch = {name: self._random(name, x) for name, x in self._shapes.items()}
      jax.block_until_ready((self._state, self._batch))
    before = time.perf_counter()
    self._state, metrics = self._step(self._state, self._batch)
    jax.block_until_ready((self._state, metrics))
    return time.perf_counter() - before

  def _random(self, name: str, like: 'jax.ShapeDtypeStruct') -> 'jax.Array':
    import jax
    import numpy as np

    most = self._vocabulary if name in ('ids', 'labels') else 2  # others are all 1
    values = np.random.default_rng(0).integers(1, most, like.shape)
    return jax.device_put(values.astype(like.dtype), like.sharding)
