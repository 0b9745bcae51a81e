"""paxlite recipe FILE|NAME [--folder=FOLDER] [--until=STAGE] [--set STAGE.NAME=VALUE …]

Runs the stages of a recipe (a Python file) in order, each as a run in a folder of its name. The
same command continues. A stage with changed values, code or data runs again, with all that need it;
paxlite says so first. See docs/recipes.md.

Exits with 1 if a condition at the end of a stage fails, and with 75 if told to stop.

Examples:
  paxlite recipe chat_small
  paxlite recipe my_recipe.py --folder=runs/mine --until=sft --set sft.LEARNING_RATE=1e-5
  paxlite recipe chat_d20 --dry_run --target=h100x8 --price=2.5
"""

import importlib
import os
import pathlib
import pkgutil
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from paxlite.cli.parser import Parser, local
from paxlite.cli.terminal import say, warn
from paxlite.cli.user_modules import import_named
from paxlite.core.errors import EXIT_AGAIN, Interrupted, TrainingError, UserError
from paxlite.core.near_names import did_you_mean
from paxlite.recipes import bundled, prediction
from paxlite.recipes.recipe import Files, Recipe, Stage, placed

if TYPE_CHECKING:
  from paxlite.aot.targets import Target
  from paxlite.experiments.base import Experiment
  from paxlite.recipes.experiments import Needs
  from paxlite.recipes.processes import Processes
  from paxlite.recipes.recipe_folder import RecipeFolder, Status

PARSER = Parser(__doc__)
PARSER.word('recipe', 'FILE|NAME', 'recipe file, or the name of a bundled recipe', local)
PARSER.option('--folder', 'folder of the stages (runs/RECIPE)', local, metavar='FOLDER')
PARSER.option('--until', 'last stage to run', metavar='STAGE')
PARSER.option('--set', 'value to change', action='append', default=[], metavar='STAGE.NAME=VALUE')
PARSER.option('--dry_run', 'print the stages and their needs only', bool)
PARSER.option('--target', 'with --dry_run: machine to predict hours for')
PARSER.option('--price', 'with --target: dollars per device hour')


def main(argv: Sequence[str]) -> None:
  args = PARSER.parsed(argv)
  if args.target is not None and not args.dry_run:
    raise UserError(f'--target={args.target} is for --dry_run: stages are run on this machine')
  if args.price is not None and args.target is None:
    raise UserError(f'--price={args.price} is for --target: the hours are not known without it')
  price = None if args.price is None else prediction.price_of(args.price)
  target = None if args.target is None else prediction.target_of(args.target)
  import jax

  if args.target != 'here':  # the devices are those of the stages' processes
    jax.config.update('jax_platforms', 'cpu')
  from paxlite.files.folder_lock import FolderLock
  from paxlite.recipes import experiments, results
  from paxlite.recipes.processes import Processes
  from paxlite.recipes.recipe_folder import RecipeFolder

  module = module_of(args.recipe)
  recipe = recipe_in(module).changed(args.set)
  names = [*recipe.stages]
  if args.until is not None:
    recipe.named(args.until, '--until')
    names = names[: names.index(args.until) + 1]
  folder = pathlib.Path(args.folder or f'runs/{module.rpartition(".")[2]}').absolute()
  built = experiments.built(recipe, folder)
  place, lock = RecipeFolder(recipe, module, folder), FolderLock(folder)
  if not args.dry_run:
    lock.acquire()
  statuses = place.statuses(names, built)
  needs = {name: experiments.needs_of(built[name]) for name in names if name in built}
  header = ['stage', 'parameters', 'tokens', 'FLOPs', 'bytes on disk', '']
  rows = [[n, *experiments.shown(needs, n), str(status)] for n, status in statuses.items()]
  table = [header, *rows]
  if target is not None:
    table = _with_hours(table, {n: e for n, e in built.items() if n in names}, target, price)
  for line in results.lines(table):
    say(line)
  if target is not None:
    say(prediction.NOTE)
  if args.dry_run:
    return
  _check_disk(folder, needs, statuses)
  processes = Processes()
  try:
    with processes.listening():
      folder.mkdir(parents=True, exist_ok=True)
      lock.acquire()
      for sentence in place.begin(statuses):
        say(sentence)
      for number, name in enumerate(names, 1):
        processes.check()
        if statuses[name].state != 'done':
          say(f'\nStage {number} of {len(names)}: {name}')
          _run(recipe, name, place, statuses[name], processes, module)
        _check_holds(recipe, name, folder)
  except Interrupted as e:
    warn(f'interrupted: {e}. The same command continues')
    sys.exit(EXIT_AGAIN)
  except TrainingError as e:
    warn(f'stopped: {e}')
    sys.exit(1)
  if len(found := results.table(recipe, folder)) > 1:
    say('\n' + '\n'.join(results.lines(found)))


def _with_hours(
  table: Sequence[Sequence[str]],
  built: Mapping[str, 'Experiment'],
  target: 'Target',
  price: float | None,
) -> list[list[str]]:
  """Returns a table of stages with their hours on a machine, their cost, and the sums."""
  hours: dict[str, float | None] = {}
  for name, e in built.items():
    warn(f'predicting {name} on {target.name}')
    hours[name] = prediction.hours_of(e, target, name)
  header, *rows = table
  rows = [*rows, [''] * len(header)]
  added = [prediction.cells(hours[row[0]], target, price) if row[0] in hours else ['', '']
           for row in rows[:-1]]  # fmt: skip
  known = [each for each in hours.values() if each is not None]
  total = sum(known) if len(known) == len(hours) else None
  added.append(prediction.cells(total, target, price))
  shown = 1 if price is None else 2
  pairs = zip([header, *rows], [['hours', 'dollars'], *added], strict=True)
  return [[*row[:-1], *cells[:shown], row[-1]] for row, cells in pairs]


def module_of(given: str) -> str:
  """Returns the dotted module name of a recipe file or of a bundled recipe."""
  known = [found.name for found in pkgutil.iter_modules(bundled.__path__)]
  if given in known:
    return f'{bundled.__name__}.{given}'
  if not given.endswith('.py'):
    meant = did_you_mean(given, known, cutoff=0.6) or f'Those of paxlite: {", ".join(known)}'
    raise UserError(f'{given} is neither a file NAME.py nor a recipe of paxlite. {meant}')
  path = os.path.relpath(given)
  if not os.path.isfile(path):
    raise UserError(f'{given} is missing')
  name = path.removesuffix('.py').replace(os.sep, '.')
  if not all(part.isidentifier() for part in name.split('.')):
    raise UserError(
      f'{given}: {name} is not a Python module name: go to the folder of the file, or one above '
      'it, and name the file with letters, digits and _'
    )
  return name


def recipe_in(module: str) -> Recipe:
  """Returns the recipe of a module: its RECIPE, or what that returns."""
  is_bundled = module.startswith(f'{bundled.__name__}.')
  found = importlib.import_module(module) if is_bundled else import_named(module)
  recipe = vars(found).get('RECIPE')
  if callable(recipe):
    recipe = recipe()
  if not isinstance(recipe, Recipe):
    raise UserError(f'{found.__file__} has no RECIPE = Recipe([…]), nor a function RECIPE')
  return recipe


def _check_disk(
  folder: pathlib.Path, needs: Mapping[str, 'Needs'], statuses: Mapping[str, 'Status']
) -> None:
  """Raises UserError if the disk has no space for the checkpoints of the stages to run."""
  wanted = sum(x.bytes for name, x in needs.items() if statuses[name].state != 'done')
  here = next(p for p in (folder, *folder.parents) if p.exists())
  free = shutil.disk_usage(here).free
  if wanted > free:
    raise UserError(
      f'the checkpoints of the stages take {wanted:,} bytes, but {free:,} are free at {folder}: '
      'make room, choose another --folder, or set CHECKPOINT_MAX_TO_KEEP of the stages'
    )


def _run(
  recipe: Recipe,
  name: str,
  place: 'RecipeFolder',
  status: 'Status',
  processes: 'Processes',
  module: str,
) -> None:
  """Runs or continues a stage to its end."""
  from paxlite.recipes.experiments import values_of
  from paxlite.recipes.processes import wait_until_free

  stage, folder = recipe.stages[name], place.folder / name
  place.starts(name, status.made_of)
  if isinstance(stage, Stage):
    wait_until_free(folder)
    words = [f'{k}={text}' for k, text in values_of(recipe, stage, place.folder).items()]
    own = [] if module.startswith('paxlite.') else [f'--import={module}']
    _finished(processes, name, ['train', stage.class_name, f'--folder={folder}', *own, *words])
  else:
    _make(recipe, stage, place, processes)
  place.ends(name)


def _make(recipe: Recipe, stage: Files, place: 'RecipeFolder', processes: 'Processes') -> None:
  """Makes the files of a stage in a folder that gets its name when they are complete."""
  folder, unfinished = place.folder / stage.name, place.unfinished(stage.name)
  if folder.exists():
    return  # it was killed right after them
  shutil.rmtree(unfinished, ignore_errors=True)
  unfinished.mkdir()
  folders = {name: str(place.folder / name) for name in recipe.stages}
  folders[stage.name] = str(unfinished)
  if callable(stage.makes):
    stage.makes(unfinished, **{k: placed(value, folders) for k, value in stage.values.items()})
  else:
    _finished(processes, stage.name, placed(stage.command, folders))
  unfinished.rename(folder)


def _finished(processes: 'Processes', name: str, arguments: Sequence[str]) -> None:
  """Runs a stage's command; exits with its exit code unless that is 0."""
  code = processes.run(arguments)
  if code == EXIT_AGAIN:
    raise Interrupted(f'stage {name} was asked to leave')
  if code:
    warn(f'error: stage {name} ended with exit code {code}; the same command continues')
    sys.exit(code)


def _check_holds(recipe: Recipe, name: str, folder: pathlib.Path) -> None:
  """Raises TrainingError if a stage does not meet the condition at its end."""
  from paxlite.recipes.results import unmet

  stage = recipe.stages[name]
  if isinstance(stage, Stage) and (problem := unmet(stage, folder / name)):
    raise TrainingError(f'stage {name}: {problem}')
