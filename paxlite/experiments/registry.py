"""Finds experiments by name."""

import contextlib
import importlib
import inspect
import os
import pathlib
import pkgutil
import re
import sys
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import TypeVar, cast

import fiddle as fdl

from paxlite import extensions
from paxlite.cli.user_modules import hidden, import_named
from paxlite.config.experiment_file import FINE_TUNING
from paxlite.config.former_names import current
from paxlite.config.templates import selections_named
from paxlite.core.errors import UserError
from paxlite.core.json_text import Json
from paxlite.core.near_names import did_you_mean
from paxlite.experiments import options
from paxlite.experiments.base import Experiment

_REGISTRY: dict[str, type[Experiment]] = {}


# what models of the hub end in, which decides neither sizes nor layers
_HUB_ENDING = re.compile(r'[-_](hf|base|it|instruct|chat)$', re.I)


E = TypeVar('E', bound=type[Experiment])


def register(cls: E) -> E:
  """Registers an experiment class under its bare name; use it as a decorator.

  Puts a command that runs the experiment before its docstring, unless that begins with one. Raises
  UserError if another experiment with this name is registered.
  """
  other = _REGISTRY.get(cls.__name__)
  if other is not None and (other.__module__, other.__qualname__) != (
    cls.__module__,
    cls.__qualname__,
  ):
    ours = cls.__module__.startswith('paxlite.')  # its module may be imported after a user's
    kept, renamed = (cls, other) if ours else (other, cls)
    raise UserError(
      f'an experiment {cls.__name__} is registered by {kept.__module__} already: rename the one '
      f'in {renamed.__module__}, or remove its @register'
    )
  _REGISTRY[cls.__name__] = cls
  doc = inspect.cleandoc(cls.__doc__ or '')
  if not doc.startswith('python -m '):
    command = f'python -m paxlite.main --fdl_config={cls.__name__} --dry_run'
    cls.__doc__ = f'{command}\n\n{doc}'.rstrip()
  return cls


def _packages() -> tuple[str, ...]:
  """The packages that hold the experiments of paxlite and of extensions."""
  return 'paxlite.experiments', *(name for e in extensions.found() for name in e.experiments)


def experiments() -> dict[str, type[Experiment]]:
  """Returns all registered experiments in paxlite and in the modules imported so far."""
  for package in _packages():
    path = importlib.import_module(package).__path__
    for module in pkgutil.iter_modules(path):
      with contextlib.suppress(Absent):
        imported(f'{package}.{module.name}')
  return dict(sorted(_REGISTRY.items()))


def _modules_of(name: str) -> list[ModuleType]:
  """Imports the paxlite modules that define a class; importing all takes 0.2 seconds."""
  return [
    imported(f'{package}.{path.relative_to(folder).parts[0].removesuffix(".py")}')
    for package in _packages()
    for folder in importlib.import_module(package).__path__
    for pattern in ('*.py', '*/__init__.py')
    for path in sorted(pathlib.Path(folder).glob(pattern))
    if re.search(rf'^class {re.escape(name)}\b', path.read_text(encoding='utf-8'), re.M)
  ]


class Absent(UserError):
  """A module of experiments needs a family or a leaf that is not installed."""


def imported(module: str) -> ModuleType:
  try:
    return importlib.import_module(module)
  except ModuleNotFoundError as e:
    if not (e.name or '').startswith('paxlite.'):
      raise
    raise Absent(f'{module} needs {e.name}, which is not installed') from None


def find(name: str) -> type[Experiment]:
  """Returns the experiment with a registered name or a dotted path.

  A class path of another system finds the same class here.

  Only subclasses of Experiment are returned; nothing else is ever called or instantiated. Raises
  UserError if no experiment has this name (the message suggests similar ones), or a user's module
  registers the name of one of paxlite's.
  """
  if os.path.isfile(os.path.join(name, 'experiment.json')):
    raise UserError(
      f'{name} is a folder of a run or of weights, but this command takes an experiment: a name '
      'of `paxlite list`, or package.module.Class. `paxlite --help` lists commands for runs'
    )
  if '.' not in name:
    found = _REGISTRY.get(name)
    if found is None or not found.__module__.startswith('paxlite.'):
      _modules_of(name)
    if name not in _REGISTRY and name not in (known := experiments()):
      raise UserError(f'{name}: no experiment has this name. {_meant(name, known)}')
    return _REGISTRY[name]
  if here := extensions.hint('path', name):
    return find(here)
  cls = _attribute(name, '--fdl_config')
  if not (isinstance(cls, type) and issubclass(cls, Experiment)):
    raise UserError(f'{name} is not an Experiment class')
  return cls


def _meant(name: str, known: Iterable[str]) -> str:
  """Returns a sentence on what is meant by a bare name, or by a model's name on the hub."""
  last = name.rpartition('/')[2]
  if tuned := finetuning_of(last):
    model, method = tuned
    return (
      f'paxlite finetune {model} --method={method} CHECKPOINT_RESTORE_PATH=WEIGHTS trains it, and '
      f'{FINE_TUNING[method]} with MODEL={model} is its experiment'
    )
  return (
    extensions.hint('experiment', name)
    or did_you_mean(_HUB_ENDING.sub('', last), known, cutoff=0.7)
    or (f'paxlite list {last} lists some' if any(last.lower() in n.lower() for n in known) else '')
    or 'List them: paxlite list'
  )


def find_known(
  name: str, way_out: str = '--import={0}, or `import {0}` in Python before'
) -> type[Experiment]:
  """Returns the experiment that a file names, from paxlite or a module that is imported already.

  Checkpoints may come from untrusted sources, and importing a module runs its code. Raises
  UserError if there is no such experiment, or its module is not imported.

  Args:
    name: A dotted path.
    way_out: How the user imports a module; {0} is its name.
  """
  module = name.rpartition('.')[0]
  if module and not module.startswith(_packages()) and module not in sys.modules:
    raise UserError(
      f'the checkpoint is of the experiment {name}, and paxlite does not import modules for '
      f'checkpoints: if it is yours, {way_out.format(module)}'
    )
  return find(name)


def class_of(found: Mapping[str, Json]) -> type[Experiment]:
  """Returns the class of the experiment that an experiment.json describes, as find_known does."""
  return find_known(found['experiment']).of_values(found['values'])


def find_model(name: str) -> type[Experiment]:
  """Returns the experiment that MODEL names: a class of paxlite.experiments, or a dotted path.

  Families such as Gemma are found too, which have no sizes and are not registered. A file may name
  a model, so that only paxlite's modules are imported. Raises UserError if there is no such
  experiment, or its module is not imported.
  """
  if '.' in name:
    return find_known(name)
  for module in _modules_of(name):
    cls = getattr(module, name, None)
    if isinstance(cls, type) and issubclass(cls, Experiment):
      return cls
  known = experiments()
  if name in known:  # registered by a module of the user
    return known[name]
  models = [n for n, cls in known.items() if not has_data(cls)]
  raise UserError(f'MODEL={name}: no model has this name. {_meant(name, models)}')


def has_data(cls: type[Experiment]) -> bool:
  """Returns whether a class is more than a model: it says what is trained on."""
  return cls.train_input is not Experiment.train_input


def finetuning_of(name: str) -> tuple[str, str] | None:
  """Returns the model and the method that the name of a former class names; None for others.

  LLaMA3_8BSFT, for example, is LLaMA3_8B and sft.
  """
  found = re.fullmatch(r'(\w+?)[-_]?(sft|lora|documents)', name.rpartition('.')[2], re.I)
  if found is None:
    return None
  letters = found[1].lower()
  models = {n.lower(): n for n, cls in experiments().items() if not has_data(cls)}
  return (models[letters], found[2].lower()) if letters in models else None


def apply_fiddler(cfg: fdl.Config, name: str) -> None:
  """Calls on `cfg` the function `name`: a dotted path or a name in the experiment's module.

  Raises UserError if there is no such function, or it sets an attribute of a part that `cfg` lacks.
  """
  if '.' not in name:
    name = f'{fdl.get_callable(cfg).__module__}.{name}'
  function = _attribute(name, '--fiddler')
  if not inspect.isfunction(function):
    raise UserError(f'--fiddler={name} is not a function')
  with selections_named(f'--fiddler={name}'):
    try:
      function(cfg)
    except AttributeError as e:
      absent, cls = re.match(r"No parameter (?:named )?'(\w+)' ", str(e)), fdl.get_callable(cfg)
      if absent is None:
        raise
      now, message = current(absent[1]), options.missing(cast(type, cls), absent[1])
      if now != absent[1]:
        message = f'the attribute {absent[1]} is now called {now}'
      if not message:
        raise
      raise UserError(f'--fiddler={name}: {message}') from None


def _attribute(dotted: str, flag: str) -> object:
  module_name, _, attribute = dotted.rpartition('.')
  if dotted.endswith('.py') or not all(part.isidentifier() for part in dotted.split('.')):
    raise UserError(f'{flag}={dotted} is not a dotted path. {_dotted(dotted, flag)}')
  try:
    module = import_named(module_name)
  except ModuleNotFoundError as e:
    if e.name is not None and (module_name + '.').startswith(e.name + '.'):
      hint = extensions.hint('experiment', dotted)
      if attribute in experiments():
        hint = f'It is {flag}={attribute} here.'
      if not hint and module_name.startswith(_packages()):
        hint = 'paxlite may have removed it: continue a run with the version that started it.'
      hint = hidden(module_name) or hint
      raise UserError(f'{flag}={dotted}: no module is named {e.name}. {hint}'.rstrip()) from None
    if (e.name or '').startswith('paxlite.'):
      raise UserError(f'{flag}={dotted} needs {e.name}, which is not installed') from None
    raise  # the module exists, but one of its own imports is missing
  if not hasattr(module, attribute):
    meant = did_you_mean(attribute, dir(module), cutoff=0.7)
    if flag == '--fdl_config' and finetuning_of(attribute):
      meant = _meant(attribute, ())
    hint = extensions.hint('experiment', dotted) or meant
    raise UserError(f'{flag}={dotted}: {module_name} has no {attribute}. {hint}'.rstrip())
  return getattr(module, attribute)


def _dotted(path: str, flag: str) -> str:
  """Returns a sentence on what is meant by a path of files, or by a model's name on the hub."""
  known = experiments()
  last = re.split(r'[/.:]', path)[-1]
  if path.startswith(('paxml', 'praxis', 'paxlite')) and last in known:
    return f'It is {flag}={last} here.'
  name = re.sub(r'\.py$|\.py(?=[.:])', '', path).strip('./').replace('/', '.').replace(':', '.')
  if path.endswith('.py'):
    name += '.CLASS'
  is_name = all(part.isidentifier() for part in name.split('.'))
  if flag == '--fdl_config' and '.py' not in path and not (is_name and last[:1].isupper()):
    return _meant(path, known)
  if not is_name:
    name = 'package.module.Name'
  return extensions.hint('experiment', name) or f'Write {flag}={name}'
