"""paxlite plan EXPERIMENT {--target=h100x64 | --prices=FILE} [NAME=VALUE …] [--keep NAME …]

Finds the mesh, the batch and the recomputation with which an experiment fits a machine and trains
fastest. The machine need not be there: the compiler judges the candidates that look best. On
`here`, their steps are run. Ctrl-C prints the best so far; what was judged is kept.

NAME=VALUE sets an attribute of the experiment and keeps it. Without --global_batch, the batch is
chosen too, by the time for each of its rows.

--prices=PRICES.json says which machine to rent: the file has the price of an hour by target, such
as {"h100x8": 21.6, "v5e-16": 19.2}, and the answer is a table of what the run costs on each.

Exits with 1 if nothing fits, with 2 for wrong input, and with 130 after Ctrl-C.

Examples:
  paxlite plan LLaMA3_8B --target=h100x64 --global_batch=512
  paxlite plan DemoGPT --target=here --keep PERCORE_BATCH_SIZE
  paxlite plan LLaMA3_8B --prices=prices.json --global_batch=512 MAX_STEPS=10000
"""

import argparse
import json
import os
import pathlib
import platform
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from paxlite.cli.parser import Parser, experiment_name, stored
from paxlite.cli.terminal import say
from paxlite.core.errors import UserError
from paxlite.core.json_text import JsonObject
from paxlite.files.output import check_output, write_output
from paxlite.files.schemes import is_address

if TYPE_CHECKING:
  import jax

  from paxlite.aot.planning.machine import Machine
  from paxlite.aot.planning.space import Space
  from paxlite.aot.planning.verdicts import Store
  from paxlite.aot.planning.workers import WorkerPool
  from paxlite.experiments.language_model import LanguageModel


PARSER = Parser(__doc__)
PARSER.word('fdl_config', 'EXPERIMENT', 'the experiment', experiment_name)
PARSER.option('--fiddler', 'a function that edits the config', action='append', default=[])
PARSER.option('--target', 'the machine, as for `paxlite compile`')
PARSER.option('--prices', 'prices an hour of several machines; see docs/planning.md', stored)
PARSER.option('--global_batch', 'rows of a batch on all devices', int)
PARSER.option('--seq_len', 'tokens of a row (MAX_SEQ_LEN)', int)
_names: dict[str, Any] = {'nargs': '+', 'action': 'extend', 'default': [], 'metavar': 'NAME'}
PARSER.option('--keep', 'do not choose these', **_names)
PARSER.option('--try', 'also choose these: USE_FP8, USE_INT8', dest='tried', **_names)
PARSER.option('--most', 'candidates to compile or run (24)', int, default=24)
PARSER.option('--workers', 'processes that compile (one a core)', int)
PARSER.option('--calibration', 'measured speeds of the chip; see docs/planning.md', stored)
PARSER.option('--json', 'where the plan goes as JSON', stored)
PARSER.option('--verdicts', "where verdicts are kept (the user's cache)", stored)
PARSER.attributes()
# what the answer depends on, with the values of the experiment
_QUESTION = ('fdl_config', 'fiddler', 'target', 'global_batch', 'keep', 'tried', 'most')
# environment variables that decide which devices a process sees
_DEVICES = ('JAX_PLATFORMS', 'XLA_FLAGS', 'CUDA_VISIBLE_DEVICES', 'TPU_VISIBLE_CHIPS')


def main(argv: Sequence[str]) -> None:
  args = PARSER.parsed(argv)
  for flag in ('global_batch', 'seq_len', 'most', 'workers'):
    value = getattr(args, flag)
    if value is not None and value < 1:
      raise UserError(f'--{flag}={value} must be at least 1')
  is_here = args.json is not None and not is_address(args.json)
  if is_here and not pathlib.Path(args.json).absolute().parent.is_dir():
    raise UserError(f'--json={args.json}: there is no such folder')
  check_output('--json', args.json)
  if (args.target is None) == (args.prices is None):
    raise UserError(f'name a machine with --target, or several with --prices: {PARSER.usage}')
  answer = (planned if args.prices is None else priced)(args, args.attributes)
  say(answer['page'])
  if args.json is not None:
    write_output(args.json, (json.dumps(answer['json'], indent=1) + '\n').encode())
  if answer['interrupted']:
    sys.exit(128 + signal.SIGINT)
  if not answer['fits']:
    sys.exit(1)


def priced(args: argparse.Namespace, overrides: dict[str, str]) -> JsonObject:
  """The answer, as `planned` gives it, about all machines of a file of prices."""
  from paxlite.aot import targets
  from paxlite.aot.planning import prices

  of_targets = prices.read(args.prices)
  calibrated = prices.calibrated(of_targets, args.calibration)
  targets.prepare_environment()
  experiment = experiment_of(args, overrides)
  steps = None if experiment.NUM_EPOCHS is not None else experiment.MAX_STEPS
  of_all = None if args.global_batch is None else steps
  offers, interrupted = list[JsonObject](), False
  for i, (name, price) in enumerate(of_targets.items()):
    if interrupted:
      offers.append(prices.refused(name, price, 'not judged before the interrupt'))
      continue
    say(f'{name}, {i + 1} of {len(of_targets)} machines')
    try:
      calibration = args.calibration if name in calibrated else None
      about = {**vars(args), 'target': name, 'calibration': calibration}
      answer = planned(argparse.Namespace(**about), overrides)
    except UserError as e:
      offers.append(prices.refused(name, price, str(e)))
      continue
    fits, interrupted = answer['fits'], answer['interrupted']
    made = prices.offer(name, price, answer['json'], of_all) if fits else None
    offers.append(made or prices.refused(name, price, answer['page']))
  found = prices.as_json(offers, args.fdl_config, steps, args.global_batch)
  end = '\nInterrupted: the same command continues from here' if interrupted else ''
  fits = any(o['fits'] for o in offers)
  return dict(page=prices.page(found) + end, json=found, fits=fits, interrupted=interrupted)


def experiment_of(args: argparse.Namespace, overrides: dict[str, str]) -> 'LanguageModel':
  """The experiment that is planned for.

  Raises:
    UserError: There is none, it is no language model, or --keep and --try name other attributes.
  """
  from paxlite.aot.planning import ways_out
  from paxlite.experiments.language_model import LanguageModel
  from paxlite.programs.launch import build_experiment

  length = {} if args.seq_len is None else {'MAX_SEQ_LEN': str(args.seq_len)}
  experiment = build_experiment(args.fdl_config, args.fiddler, {**overrides, **length})
  if not isinstance(experiment, LanguageModel):
    raise UserError(
      f'{args.fdl_config} is not a language model, and paxlite plan takes only these: paxlite '
      'compile judges one mesh'
    )
  ways_out.check_names({'keep': args.keep, 'try': args.tried})
  return experiment


def planned(args: argparse.Namespace, overrides: dict[str, str]) -> JsonObject:
  """The answer: `page`, `json`, `fits` and `interrupted`; that of an earlier call if it is kept."""
  from paxlite.aot import targets
  from paxlite.processes import cpu_memory

  measures = args.target == 'here'
  # the environment of the workers, which see the devices and run steps as `paxlite train` would
  environment = {**os.environ, **cpu_memory.environment()}
  targets.prepare_environment()  # this process leaves the devices to the worker
  if not measures:
    environment = dict(os.environ)

  from paxlite.aot.planning import machine, space, verdicts, ways_out
  from paxlite.aot.planning.workers import WorkerPool
  from paxlite.compilation import compiled_step

  experiment = experiment_of(args, overrides)
  if experiment.NUM_EPOCHS is not None:
    experiment = experiment.replaced(NUM_EPOCHS=None)
  if measures and args.calibration is not None:
    raise UserError(targets.NOT_HERE)
  workers = 1 if measures else args.workers or len(os.sched_getaffinity(0))
  with WorkerPool(args.target, args.calibration, workers, environment) as pool:
    if measures:
      where = described(pool, environment)
    else:
      where = machine.of_target(targets.parse(args.target, args.calibration))
    ways_out.check_counted(experiment, where)
    about = dict(
      versions=compiled_step.versions(where.platform), code=verdicts.code(), machine=where.identity,
      flags=environment.get('XLA_FLAGS', ''), python=sys.version_info[:2],
    )  # fmt: skip
    store = verdicts.Store(args.verdicts, about)
    question = {name: getattr(args, name) for name in _QUESTION}
    question |= dict(given=overrides, values=experiment.values())
    question |= dict(planner=verdicts.code('aot/planning'))
    if (kept := store.read(question)) is not None:
      return kept
    keep = frozenset({*args.keep, *(name for name in overrides if name in space.NAMES)})
    candidates = space.Space(experiment, where, keep, frozenset(args.tried), args.global_batch)
    answer = searched(candidates, args, overrides, pool, store)
  if not answer['interrupted']:
    store.write(question, answer)
  return answer


def searched(
  space: 'Space', args: argparse.Namespace, overrides: dict[str, str], pool: 'WorkerPool',
  store: 'Store',
) -> JsonObject:  # fmt: skip
  """The answer of a search; nothing is compiled if the state alone is too large for the devices.

  Raises:
    UserError: No mesh can split the batch.
  """
  from paxlite.aot.planning import pages, ways_out
  from paxlite.aot.planning.estimate import Estimator
  from paxlite.aot.planning.model import Model
  from paxlite.aot.planning.search import Plan, Search

  device = traced_device(space.machine)
  estimator = Estimator(Model(space.experiment, device), space.machine)
  lean = ways_out.leanest(space, estimator)
  if lean is None:
    raise UserError(ways_out.nothing_valid(space))
  search = Search(space, estimator, pool, store, args.most, say)
  found = Plan(space) if lean[1].state > space.machine.memory else search.run()
  if found.best or found.interrupted:
    page = pages.page(found, args.fdl_config, overrides, args.fiddler)
    if found.best and all(j.candidate.on_host for j in found.best):
      on_devices = ways_out.without_host(space)
      lean = ways_out.leanest(on_devices, estimator)
      if lean is None or lean[1].memory > space.machine.memory:  # they need the host
        page = f'{ways_out.message(on_devices, estimator, device)}\n\n{page}'
  else:
    needed = [j.verdict.memory for j in found.judged if j.verdict.memory]
    page = ways_out.message(space, estimator, device, min(needed, default=None))
  return dict(
    page=page, json=pages.as_json(found, args.fdl_config, overrides), fits=bool(found.best),
    interrupted=found.interrupted,
  )  # fmt: skip


def described(pool: 'WorkerPool', environment: Mapping[str, str]) -> 'Machine':
  """The machine that is here. The first call measures its speed, and keeps it."""
  import jax

  from paxlite.aot.planning import machine, verdicts
  from paxlite.core import host_memory

  variables = {name: environment.get(name, '') for name in _DEVICES}
  about = dict(devices=variables, node=platform.node(), versions=jax.__version__)
  store, question = verdicts.Store(None, about), {'question': 'devices'}
  said = store.read(question)
  if said is None:
    said = pool.describe()
    store.write(question, said)
  if said['platform'] == 'cpu' and (available := host_memory.available()):
    said['memory'] = available / said['devices']
  return machine.of_description(said)


def traced_device(where: 'Machine') -> 'jax.Device':
  """A device of a machine's kind, which need not be there, for which a model is traced."""
  import jax

  from paxlite.aot import targets

  if where.platform == 'cpu':
    return jax.devices('cpu')[0]
  name = targets.one_of(where.chip) if where.measured else where.name
  return targets.parse(name).topology()[0]
