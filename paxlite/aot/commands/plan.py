"""paxlite plan EXPERIMENT --target=h100x64 [NAME=VALUE …] [--keep NAME …]

Lists meshes, batches and recomputations with which an experiment fits a machine, fastest first,
with their memory and time, and prints the training command of the first. You need not have the
machine: the compiler judges the best candidates. On `here`, their steps run. Ctrl-C prints the best
so far and keeps what was judged.

NAME=VALUE sets an attribute and keeps it. Without --global_batch, the batch is chosen too, by time
per sequence.

Exits with 1 if nothing fits, 2 for wrong input, and 130 after Ctrl-C.

Examples:
  paxlite plan LLaMA3_8B --target=h100x64 --global_batch=512
  paxlite plan DemoGPT --target=here --keep PERCORE_BATCH_SIZE
"""

import argparse
import dataclasses
import json
import os
import platform
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paxlite.cli.parser import Parser, experiment_name, stored
from paxlite.cli.terminal import say
from paxlite.core.errors import UserError
from paxlite.files.output import check_output, write_output

if TYPE_CHECKING:
  import jax

  from paxlite.aot.planning.machine import Machine
  from paxlite.aot.planning.search import Plan
  from paxlite.aot.planning.space import Space
  from paxlite.aot.planning.verdicts import Store
  from paxlite.aot.planning.workers import WorkerPool
  from paxlite.experiments.language_model import LanguageModel


PARSER = Parser(__doc__)
PARSER.word('fdl_config', 'EXPERIMENT', 'experiment', experiment_name)
PARSER.option('--fiddler', 'function that edits the config', action='append', default=[])
PARSER.option('--target', 'machine, as for `paxlite compile`', required=True)
PARSER.option('--global_batch', 'sequences per global batch', int)
_names: dict[str, Any] = {'nargs': '+', 'action': 'extend', 'default': [], 'metavar': 'NAME'}
PARSER.option('--keep', 'attributes to keep', **_names)
PARSER.option('--most', 'candidates to compile or run (16)', int, default=16)
PARSER.option('--workers', 'compiling processes (one per core)', int)
PARSER.option('--calibration', 'measured chip speeds; see docs/planning.md', stored)
PARSER.option('--json', 'plan to write as JSON, with all commands', stored)
PARSER.attributes()


def main(argv: Sequence[str]) -> None:
  args = PARSER.parsed(argv)
  for flag in ('global_batch', 'most', 'workers'):
    value = getattr(args, flag)
    if value is not None and value < 1:
      raise UserError(f'--{flag}={value} must be at least 1')
  check_output('--json', args.json)
  plan, page = planned(args)
  say(page)
  if args.json is not None:
    from paxlite.aot.planning import pages

    write_output(args.json, (json.dumps(pages.as_json(plan, args), indent=1) + '\n').encode())
  if plan.interrupted:
    sys.exit(128 + signal.SIGINT)
  if not plan.best:
    sys.exit(1)


def planned(args: argparse.Namespace) -> tuple['Plan', str]:
  """Returns the plan for what the user wrote, and its page."""
  from paxlite.aot import targets
  from paxlite.processes import cpu_memory

  measures = args.target == 'here'
  # the environment of the workers, which see the devices and run steps as `paxlite train` would
  environment = {**os.environ, **(cpu_memory.environment() if measures else {})}
  targets.prepare_environment()  # this process leaves the devices to the worker

  from paxlite.aot.planning import machine, space, verdicts
  from paxlite.aot.planning.workers import WorkerPool
  from paxlite.compilation import compiled_step

  experiment = experiment_of(args)
  if measures and args.calibration is not None:
    raise UserError(targets.NOT_HERE)
  workers = 1 if measures else args.workers or len(os.sched_getaffinity(0))
  with WorkerPool(args.target, args.calibration, workers, environment) as pool:
    target = None if measures else targets.parse(args.target, args.calibration)
    where = pool.machine() if target is None else machine.of_target(target)
    about = dict(
      versions=compiled_step.versions(where.platform), code=verdicts.code_of(experiment),
      machine=dataclasses.replace(where, memory=0.0), node=platform.node(),
      flags=environment.get('XLA_FLAGS', ''),
    )  # fmt: skip
    keep = frozenset({*args.keep, *(name for name in args.attributes if name in space.NAMES)})
    candidates = space.Space(experiment, where, keep, args.global_batch)
    return searched(candidates, args, pool, verdicts.Store(about))


def experiment_of(args: argparse.Namespace) -> 'LanguageModel':
  """Returns the experiment that is planned for.

  Raises:
    UserError: There is none, its steps cannot be estimated, or --keep names other attributes.
  """
  from paxlite.aot.planning import space
  from paxlite.experiments.language_model import LanguageModel
  from paxlite.programs.launch import build_experiment

  experiment = build_experiment(args.fdl_config, args.fiddler, args.attributes)
  if (refused := space.refusal(experiment)) is not None:
    raise UserError(f'{refused}. paxlite compile takes this experiment')
  assert isinstance(experiment, LanguageModel)
  if wrong := [name for name in args.keep if name not in space.NAMES]:
    chosen = ', '.join(space.NAMES)
    raise UserError(f'--keep={wrong[0]}: the planner chooses only {chosen}')
  return experiment if experiment.NUM_EPOCHS is None else experiment.replaced(NUM_EPOCHS=None)


def searched(
  space: 'Space', args: argparse.Namespace, pool: 'WorkerPool', store: 'Store'
) -> tuple['Plan', str]:
  """Returns what a search finds, and its page; raises UserError if no mesh can split the batch.

  Nothing is compiled if the state alone is too large for the devices.
  """
  from paxlite.aot.planning import pages, ways_out
  from paxlite.aot.planning.estimate import Estimator
  from paxlite.aot.planning.model import Model
  from paxlite.aot.planning.search import Plan, Search

  estimator = Estimator(Model(space.experiment, traced_device(space.machine)), space.machine)
  lean = ways_out.leanest(space, estimator)
  if lean is None:
    raise UserError(ways_out.nothing_valid(space))
  search = Search(space, estimator, pool, store, args.most, say)
  plan = Plan(space) if lean[1].state > space.machine.memory else search.run()
  if plan.best or plan.interrupted:
    return plan, pages.page(plan, args)
  needed = [j.verdict.memory for j in plan.judged if j.verdict.memory]
  return plan, ways_out.message(space, estimator, min(needed, default=None))


def traced_device(where: 'Machine') -> 'jax.Device':
  """Returns a device of a machine's kind, which need not be there, to trace a model for."""
  import jax

  from paxlite.aot import targets

  if where.platform == 'cpu':
    return jax.devices('cpu')[0]
  name = targets.one_of(where.chip) if where.measured else where.name
  return targets.parse(name).topology()[0]
