"""python -m benchmarks.plan [h100x8 v5e-8 here order]: how good the choices of `paxlite plan` are.

For a target, every candidate of a small grid is judged, and then the planner searches the same grid
with a small budget: its choice is compared with the best of all, and its predictions of memory with
the compiler. `order` measures steps of DemoGPTAdam on the devices of this machine, in turn, and
compares the order that the planner predicts without compiling anything. Results go to
benchmarks/results/plan/. Verdicts are kept in the cache folder: a second call takes seconds.
`--replay` asks no compiler, and takes the verdicts of the results instead.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from paxlite.aot import targets
from paxlite.processes import cpu_memory

RESULTS = pathlib.Path(__file__).parent / 'results' / 'plan'
SMALL = dict(NUM_LAYERS=3, MODEL_DIMS=256, NUM_HEADS=4, USE_REPEATED_LAYER=True)
ON_CPU = dict(NUM_LAYERS=3, USE_REPEATED_LAYER=True)
FEW = ('SAVE_NOTHING', 'SAVE_EVERYTHING')
MORE = ('SAVE_NOTHING', 'SAVE_DOT_WITH_NO_BATCH_DIM', 'SAVE_EVERYTHING')
# experiment, changes, rows of a batch, bytes of a device that may be used, policies, loss chunks
GRIDS: dict[str, tuple[str, dict[str, Any], int, float, tuple[str, ...], tuple[int, ...]]] = {
  'h100x8': ('Synthetic126M', SMALL, 64, 1.5 * 2**30, MORE, (1, 4)),
  'v5e-8': ('Synthetic126M', SMALL, 64, 4 * 2**30, FEW, (1,)),
  'here': ('DemoGPTAdam', ON_CPU, 16, 80 * 2**20, FEW, (1, 4)),
}
SHARE = 4  # the planner may judge a part of the grid, one of so many candidates, and at least six
ROUNDS = 3


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('names', nargs='*', default=[*GRIDS, 'order'])
  parser.add_argument('--workers', type=int, default=len(os.sched_getaffinity(0)))
  parser.add_argument('--replay', action='store_true', help='takes the verdicts of the results')
  args = parser.parse_args()
  RESULTS.mkdir(parents=True, exist_ok=True)
  if 'order' in args.names and (changes := cpu_memory.environment()):  # as a run has them
    command = [sys.executable, '-m', 'benchmarks.plan', *sys.argv[1:]]
    os.execve(sys.executable, command, {**os.environ, **changes})
  for name in args.names:
    result = order() if name == 'order' else grid(name, args.workers, args.replay)
    (RESULTS / f'{name}.json').write_text(json.dumps(result, indent=1) + '\n')
    print(json.dumps({k: v for k, v in result.items() if not isinstance(v, list)}), flush=True)


class Replayed:
  """Says of each candidate what was said in an earlier call, by its attributes."""

  size = 1

  def __init__(self, name: str, candidates: Sequence[Any]):
    found = json.loads((RESULTS / f'{name}.json').read_text())['judged']
    said = {j['candidate']: (j['memory'], j['seconds']) for j in found}
    self._said = [(c.attributes, said[str(c)]) for c in candidates]

  def judge(self, questions: Sequence[Any]) -> Any:
    from paxlite.aot.planning.verdicts import Verdict

    for i, (_, values, _) in enumerate(questions):
      same = (said for made, said in self._said if made.items() <= values.items())
      yield i, Verdict(*next(same))


def grid(name: str, workers: int, replays: bool) -> dict[str, Any]:
  """Judges all candidates of a grid, and compares the planner's choice with the best."""
  environment = dict(os.environ)
  here = name == 'here'
  if here:
    environment['XLA_FLAGS'] = '--xla_force_host_platform_device_count=8'
  else:
    targets.prepare_environment()
    environment = dict(os.environ)

  import jax

  from paxlite.aot.planning import machine, verdicts
  from paxlite.aot.planning.estimate import Estimator
  from paxlite.aot.planning.model import Model
  from paxlite.aot.planning.search import Plan, Search
  from paxlite.aot.planning.space import Space
  from paxlite.aot.planning.workers import WorkerPool
  from paxlite.compilation import compiled_step, versions
  from paxlite.experiments.registry import find

  experiment_name, changes, rows, memory, policies, chunks = GRIDS[name]
  experiment = find(experiment_name)().replaced(**changes)
  with WorkerPool(name, None, 1 if here else workers, environment) as workers_pool:
    if here:
      where = workers_pool.machine()
      device = jax.devices('cpu')[0]
    else:
      where = machine.of_target(targets.parse(name))
      device = targets.parse(name).topology()[0]
    where = dataclasses.replace(where, memory=memory)
    combinations = tuple(
      {'CHECKPOINT_POLICY': p, 'NUM_LOSS_CHUNKS': n, 'USE_REPEATED_LAYER': True}
      for p in policies
      for n in chunks
    )
    kept = frozenset({'NUM_MICROBATCHES'})
    space = Space(experiment, where, kept, rows, combinations)
    everything = list(space)
    pool: Any = Replayed(name, everything) if replays else workers_pool
    print(f'{name}: {len(everything)} candidates', flush=True)
    about = dict(versions=compiled_step.versions(where.platform), grid=name, replayed=replays)
    store = verdicts.Store(about | dict(code=versions.code_of_paxlite()))
    estimator = Estimator(Model(experiment, device), where)
    make = lambda most: Search(space, estimator, pool, store, most, lambda text: print(text))
    true, every = Plan(space), make(len(everything))
    asked = [(*one, one[0].of(experiment)) for one in every.estimated(true)]
    every.ask(true, asked)
    plan = make(max(len(everything) // SHARE, 6)).run()
  best, chosen = true.best[0], plan.best[0]
  judged = {str(j.candidate): j for j in true.judged}
  known = [j for j in true.judged if j.verdict.memory]
  later = [
    abs(Plan(space, judged=plan.judged[:i]).ratio * j.estimate.memory / j.verdict.memory - 1)
    for i, j in enumerate(plan.judged)
    if i >= 4 and j.verdict.memory
  ]
  first = min((j for j in true.judged if j.fits), key=lambda j: j.estimate.seconds)
  timed = [j for j in true.judged if j.verdict.seconds]
  return dict(
    target=name,
    candidates=len(everything),
    compiled=len(plan.judged),
    best=str(best.candidate),
    best_seconds=best.verdict.seconds,
    chosen=str(chosen.candidate),
    chosen_seconds=judged[str(chosen.candidate)].verdict.seconds,
    chosen_memory=chosen.verdict.memory,
    memory_limit=memory,
    worse_by=judged[str(chosen.candidate)].verdict.seconds / best.verdict.seconds - 1,
    estimated_only_worse_by=first.verdict.seconds / best.verdict.seconds - 1,
    memory_off_before_compiling_median=statistics.median(later) if later else None,
    memory_off_before_compiling_most=max(later, default=None),
    memory_off_of_the_uncorrected_median=statistics.median(
      abs(j.estimate.memory / j.verdict.memory - 1) for j in known
    ),
    order_of_time=spearman(
      [j.estimate.seconds for j in timed], [j.verdict.seconds for j in timed]
    ),
    judged=[
      dict(
        candidate=str(j.candidate), memory=j.verdict.memory, estimated_memory=j.estimate.memory,
        seconds=j.verdict.seconds, estimated_seconds=j.estimate.seconds, fits=j.fits,
        error=j.verdict.error,
      )
      for j in true.judged
    ],
  )  # fmt: skip


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
  """The correlation of the ranks of two lists."""
  import numpy as np

  ranks = [np.argsort(np.argsort(np.asarray(x))).astype(float) for x in (one, other)]
  return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def order() -> dict[str, Any]:
  """Measures steps of DemoGPTAdam in turn, and compares their order with the predicted one."""
  from paxlite.aot.planning import machine, workers
  from paxlite.aot.planning.estimate import Estimator
  from paxlite.aot.planning.model import Model
  from paxlite.aot.planning.space import Candidate, own_layout
  from paxlite.experiments.registry import find

  experiment = find('DemoGPTAdam')()
  import jax

  where = machine.here()
  estimator = Estimator(Model(experiment, jax.devices()[0]), where)
  layout = own_layout(experiment)
  cases = [
    Candidate(layout, rows, parts, dict(
      CHECKPOINT_POLICY=policy, NUM_LOSS_CHUNKS=chunks, USE_REPEATED_LAYER=repeated,
    ))
    for rows, parts in ((1, 1), (2, 1), (4, 1), (8, 1), (8, 4))
    for policy, chunks, repeated in (
      ('SAVE_EVERYTHING', 1, False), ('SAVE_OUT_PROJ', 1, True), ('SAVE_NOTHING', 4, True),
      ('SAVE_EVERYTHING', 4, False),
    )
  ]  # fmt: skip
  steps = []
  for case in cases:
    steps.append(workers.LocalStep(case.of(experiment)))
    print(f'compiled {case}', file=sys.stderr, flush=True)
  for step in steps:
    step.run()
  times: list[list[float]] = [[] for _ in cases]
  for _ in range(ROUNDS):
    for i, step in enumerate(steps):
      times[i].append(step.run())
  measured = [statistics.median(t) for t in times]
  predicted = [estimator.estimate(case).seconds for case in cases]
  alike = [i for i, case in enumerate(cases) if case.rows == 8]
  return dict(
    configurations=len(cases),
    rounds=ROUNDS,
    spearman=spearman(predicted, measured),
    spearman_of_equal_batches=spearman([predicted[i] for i in alike], [measured[i] for i in alike]),
    cases=[
      dict(candidate=str(c), predicted=p, measured=m)
      for c, p, m in zip(cases, predicted, measured, strict=True)
    ],
  )


if __name__ == '__main__':
  main()
