"""A process that judges candidates: it reads one JSON object a line, and writes one for each.

    python -m paxlite.aot.planning.worker --target=h100x8

The first line that it writes describes its devices. It compiles the train step for the target, or
runs some steps if the target is `here`.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from paxlite.aot.planning.store import Verdict
from paxlite.core.json_text import Json, JsonObject, parsed
from paxlite.core.trees import PyTree

if TYPE_CHECKING:
  import jax

  from paxlite.aot.targets import Target
  from paxlite.experiments.base import Experiment
  from paxlite.training.train_state import TrainState

_LEAST_STEPS = 3
_ON_HOST = 'The compiler computes a part of the step on the host, which the time does not count.'
_SECONDS = 2.0  # the time for which steps are measured, if these are not more than 20 steps


def main() -> None:
  parser = argparse.ArgumentParser()
  parser.add_argument('--target', required=True)
  parser.add_argument('--calibration')
  args = parser.parse_args()
  answers = os.fdopen(os.dup(1), 'w')
  os.dup2(2, 1)  # libraries may print: their lines must not be read as answers
  from paxlite.aot import targets

  if args.target != 'here':
    targets.prepare_environment()
  import jax

  jax.config.update('jax_enable_compilation_cache', False)
  target = targets.parse(args.target, args.calibration)
  said = described() if args.target == 'here' else {}
  print(json.dumps(said), file=answers, flush=True)
  for line in sys.stdin:
    asked = parsed(line)
    before = time.perf_counter()
    try:
      experiment = restored(asked['experiment'], asked['values'])
      verdict = judged(experiment, target, asked['memory'])
    except Exception as e:  # a candidate that fails is not the end of the search
      verdict = Verdict(error=f'{type(e).__name__}: {(str(e).splitlines() or [""])[0]}')
    verdict = dataclasses.replace(verdict, spent=time.perf_counter() - before)
    print(json.dumps(dataclasses.asdict(verdict)), file=answers, flush=True)


def restored(name: str, values: Mapping[str, Json]) -> 'Experiment':
  """Returns the experiment of a class with these values, validated."""
  from paxlite.experiments.registry import find

  experiment = find(name).of_values(values)(**values)
  experiment.validate()
  return experiment


def judged(experiment: 'Experiment', target: 'Target', memory: float) -> Verdict:
  """Returns the verdict about an experiment.

  Args:
    experiment: A validated experiment.
    target: The target.
    memory: Bytes of a device, for steps that are run. What the compiler says holds for any memory.
  """
  if target.chip is None:
    return measured(experiment, memory)
  from paxlite.aot import analysis

  report = analysis.compile_step(experiment, target)
  if not report.arguments:
    return Verdict(memory=float(report.total), bound=report.verdict)
  if report.costs is None or (line := report.costs.roofline) is None:
    return Verdict(memory=float(report.total), error='the compiler does not show its program')
  parts = {
    'matrix multiplications': line.compute_bound,
    'memory traffic': line.memory_bound,
    'collectives': line.exposed,
    'copies from and to the host': line.exposed_host,
  }
  mfu = report.mfu or ()
  note = _ON_HOST if '_xla_compute_type="host"' in (report.program or '') else ''
  return Verdict(
    float(report.total), line.step, line.bound, mfu, parts, host=float(report.host), note=note
  )


def measured(experiment: 'Experiment', memory: float) -> Verdict:
  """Runs some steps of an experiment on random tokens; the median counts."""
  import jax

  step = LocalStep(experiment)
  if step.memory > memory:
    return Verdict(memory=step.memory, bound='does not fit')
  step.run()
  times: list[float] = []
  while len(times) < _LEAST_STEPS or (sum(times) < _SECONDS and len(times) < 20):
    times.append(step.run())
  jax.clear_caches()
  return Verdict(step.memory, statistics.median(times), 'measured')


class LocalStep:
  """The compiled train step of an experiment on the devices that are here, and its state."""

  def __init__(self, experiment: 'Experiment'):
    """Compiles it; nothing is allocated before the first step."""
    import jax

    from paxlite.aot import analysis
    from paxlite.compilation import compiled_step

    e = experiment
    self._mesh = e.mesh()
    self._task = analysis.sharded_task(e, self._mesh)
    self._shapes = analysis.abstract_batch(e, self._mesh, [])
    self._vocabulary = e.vocab_size
    platform = self._mesh.devices.flat[0].platform
    lowered = self._task.lower_step(self._shapes)
    with self._task.compiling():
      self._step = compiled_step.compile_lowered(lowered, e.compiler_options(platform))
    self.memory = float(analysis.peak(self._step.memory_analysis(), platform))
    self._state: TrainState | None = None
    self._batch: dict[str, jax.Array] = {}
    self._jax = jax

  def run(self) -> float:
    """Runs a step; returns its seconds."""
    jax = self._jax
    if self._state is None:
      self._state = self._numbers()
      self._batch = {k: self._random(k, x) for k, x in self._shapes.items()}
      jax.block_until_ready((self._state, self._batch))
    before = time.perf_counter()
    self._state, metrics = self._step(self._state, self._batch)
    jax.block_until_ready((self._state, metrics))
    return time.perf_counter() - before

  def _numbers(self) -> 'TrainState':
    """Returns a state of random numbers, for which nothing has to be compiled."""
    import numpy as np

    jax, abstract = self._jax, self._task.abstract
    some = 0.02 * np.random.default_rng(0).standard_normal(1 << 20)

    def filled(values: np.ndarray) -> Callable[[PyTree], PyTree]:
      put = lambda x: jax.device_put(np.resize(values, x.shape).astype(x.dtype), x.sharding)
      return lambda tree: jax.tree.map(put, tree)

    moments = filled(np.abs(some))(abstract)  # a squared gradient is not negative
    return moments.replace(params=filled(some)(abstract.params))

  def _random(self, name: str, like: 'jax.ShapeDtypeStruct') -> 'jax.Array':
    import numpy as np

    numbers = np.random.default_rng(0)
    if name in ('ids', 'labels'):
      values = numbers.integers(0, self._vocabulary, like.shape)
    elif name == 'segment_pos':
      values = np.broadcast_to(np.arange(like.shape[1]), like.shape)
    else:
      values = np.ones(like.shape)
    return self._jax.device_put(values.astype(like.dtype), like.sharding)


def described() -> JsonObject:
  """Describes the devices of this machine, with the measured FLOP/s of a product and bytes/s."""
  import jax
  import jax.numpy as jnp

  from paxlite.core import host_memory
  from paxlite.parallel import devices

  found = devices.present()
  platform = {'cpu': 'cpu', 'tpu': 'tpu'}.get(found[0].platform, 'gpu')
  near = max(len([d for d in found if d.process_index == found[0].process_index]), 1)
  if platform == 'cpu':
    memory = (host_memory.available() or 1 << 34) / len(found)
  else:
    memory = min((d.memory_stats() or {}).get('bytes_limit', 1 << 34) for d in found)
  n = 2048
  a = jnp.ones((n, n), jnp.float32)
  product = jax.jit(lambda a: a @ a)
  big = jnp.ones((1 << 24,), jnp.float32)
  plus = jax.jit(lambda x: x + 1)
  flops = 2 * n**3 / _fastest(lambda: product(a))
  bandwidth = 2 * big.nbytes / _fastest(lambda: plus(big))
  share = len(found) if platform == 'cpu' else 1  # devices of a CPU share its cores
  return dict(
    platform=platform, kind=found[0].device_kind, devices=len(found), near=near, memory=memory,
    flops=flops / share, bandwidth=bandwidth / share,
  )  # fmt: skip


def _fastest(function: Callable[[], 'jax.Array']) -> float:
  times = []
  for _ in range(4):
    before = time.perf_counter()
    function().block_until_ready()
    times.append(time.perf_counter() - before)
  return min(times)


if __name__ == '__main__':
  with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
    main()
