"""Compares every experiment, as text, with a golden file, so that a change of one is reviewed.

`python -m tests.rules.test_golden --update` rewrites rules/golden/ and the table of the tool.
The text of an experiment is what differs from the class whose model it changes, and so on up to
LanguageModel. base.txt has the values of LanguageModel
and its config, templates.txt the defaults of all classes that configs are made of. So a changed
default changes one of these two files.
"""

import ast
import functools
import itertools
import json
import pathlib
import sys

import fiddle as fdl
import pytest

from paxlite.config.templates import config_text
from paxlite.core.extension import Command
from paxlite.experiments import datasets
from paxlite.experiments.base import Experiment, full_name
from paxlite.experiments.description import configs, requirements
from paxlite.experiments.language_model import LanguageModel
from paxlite.experiments.registry import experiments
from paxlite.experiments.rows import Rows
from paxlite.tools import attributes
from paxlite.tools import experiments as tools
from paxlite.tools.commands import commands, groups
from paxlite.weights.family_tables import FAMILIES
from tests.support import config_changes, runs

GOLDEN = pathlib.Path(__file__).parent / 'golden'
ATTRIBUTES_PAGE = runs.ROOT / 'docs' / 'attributes.md'
COMMANDS_PAGE = runs.ROOT / 'docs' / 'commands.md'
PACKAGE = runs.ROOT / 'paxlite'
_NEEDS: dict[tuple, list[str]] = {}
FIRST = 'gpt', 'llama'  # whose numbers of parameters make test-slow checks
_DEVICE = 'per device:'
_NEEDED = 'parameters', _DEVICE, 'global batch', 'model FLOPs'
UPDATE = 'python -m tests.rules.test_golden --update, if this is meant'


def parent(cls: type[Experiment]) -> type[Experiment]:
  """Returns the class whose model `cls` changes: the first with sizes, or else of its family."""
  models = [c for c in cls.__mro__[1:] if issubclass(c, LanguageModel)]
  sizes = lambda c: set(c.__mro__) - set(LanguageModel.__mro__)
  of_sizes = (c for c in models if any('MODEL_DIMS' in vars(b) for b in sizes(c)))
  is_part = lambda c: '.parts.' in c.__module__ or c._is_published < cls._is_published
  families = (c for c in models if not is_part(c) and not issubclass(c, Rows))
  families = itertools.chain(families, [LanguageModel])
  return next(itertools.chain(of_sizes, families))


@functools.cache
def built(cls: type[Experiment]) -> Experiment:
  return fdl.build(cls.config())


@functools.cache
def configs_of(cls: type[Experiment]) -> dict[str, fdl.Config]:
  return configs(built(cls))


def declared(cls: type[Experiment], name: str) -> object:
  """Returns the default of an attribute, where it is declared first."""
  return next((vars(c)[name] for c in reversed(cls.__mro__) if name in vars(c)), None)


def text_of(cls: type[Experiment], base: type[Experiment] | None, has_needs: bool) -> list[str]:
  """Returns lines for what differs from the class `base`; None: from declarations."""
  experiment = built(cls)
  backend = f'backend {experiment.backend}'
  lines = [] if base and backend == f'backend {built(base).backend}' else [backend]
  before = built(base).shown_values() if base else {}
  for name, value in experiment.shown_values().items():
    if base is None or repr(value) != repr(before.get(name, declared(cls, name))):
      lines.append(f'{name} = {value!r}')
  inputs: dict[str, object] = configs_of(base) if base else {}
  changed = []
  for name in dict.fromkeys([*inputs, *configs_of(cls)]):
    config = configs_of(cls).get(name, config_changes.NOTHING)
    like = inputs.get(name)
    if like is None and name.startswith('eval_inputs'):
      # an evaluation reads as training does, but for what its lines say
      changed.append(f'{name}: {config_changes.made(config)}')
      like = configs_of(cls).get('train_input')
      lines_of = config_changes.changes(name, like, config)
      changed += (x for x in lines_of if not x.startswith(f'{name}: '))
    else:
      changed += config_changes.changes(name, like, config)
  lines += config_changes.together(changed)
  if has_needs:
    known = needs_of(built(base)) if base else []
    lines += [x for x in needs_of(experiment) if x not in known]
  return [x.replace(str(runs.ROOT / 'paxlite'), 'paxlite') for x in lines]


def needs_of(experiment: Experiment) -> list[str]:
  """Returns parameters, memory and FLOPs; experiments that differ only in data share one result."""
  e = experiment
  key = config_text(e.build_task()), str(e.mesh_sizes), e.batch_size, e.MAX_SEQ_LEN
  if key not in _NEEDS:
    found = [x for x in requirements(e).splitlines() if x.startswith(_NEEDED)]
    kinds = [x.removeprefix(_DEVICE) for x in found if x.startswith(_DEVICE)]
    _NEEDS[key] = [x for x in found if not x.startswith(_DEVICE)]
    _NEEDS[key].append(f'{_DEVICE} {",".join(kinds).strip()}')
  return _NEEDS[key]


def difference(old: list[str], new: list[str]) -> list[str]:
  """Returns removed and added lines; each has the name or path of its attribute."""
  gone, added = set(old) - set(new), set(new) - set(old)
  return [f'- {x}' for x in old if x in gone] + [f'+ {x}' for x in new if x in added]


def golden_texts(has_needs: bool = True, only: str = '') -> dict[str, str]:
  """Returns the texts of base.txt and templates.txt, and of each module of experiments by its name.

  Experiments that fine-tune any model are there with a small one.

  Args:
    has_needs: Whether parameters, memory and FLOPs, for which models are traced, are in them.
    only: One name, if only that text is needed.
  """
  classes = [c.of_values({'MODEL': 'SmolLM135M'}) for c in experiments().values()]
  for cls in classes:  # and their parent classes
    if (base := parent(cls)) is not LanguageModel and base not in classes:
      classes.append(base)
  modules: dict[str, list[str]] = {}
  for cls in sorted(classes, key=full_name):
    base, module = parent(cls), cls.__module__.rpartition('.')[2]
    if only in ('', module):
      lines = [f'== {full_name(cls)} (from {full_name(base)})', *text_of(cls, base, has_needs)]
      modules.setdefault(module, []).extend([*lines, ''])
  if only in ('', 'base'):
    modules['base'] = text_of(LanguageModel, None, has_needs)
  if only in ('', 'templates'):
    kinds = {
      config_changes.name_of(kind): kind
      for cls in [LanguageModel, *classes]
      for kind in config_changes.classes(configs_of(cls))
    }
    defaults = [x for _, kind in sorted(kinds.items()) for x in config_changes.defaults(kind)]
    modules['templates'] = defaults
  return {module: ''.join(f'{x}\n' for x in lines) for module, lines in modules.items()}


def without_needs(text: str) -> str:
  return ''.join(x for x in text.splitlines(keepends=True) if not x.startswith(_NEEDED))


def index_text() -> str:
  lines = [json.dumps(tools.row(cls), ensure_ascii=False) for cls in experiments().values()]
  return '[\n' + ',\n'.join(lines) + '\n]\n'


def is_source(value: object) -> bool:
  """Returns whether a value is a class of experiments that reads a kind of dataset."""
  return (
    isinstance(value, type) and value.__module__ == datasets.__name__ and hasattr(value, 'dataset')
  )


def attributes_text() -> str:
  sources = filter(is_source, vars(datasets).values())
  published = (family.experiment for family in FAMILIES.values())  # some have no sizes
  rows = attributes.describe([*experiments().values(), *published, *sources])
  return '[\n' + ',\n'.join(json.dumps(row, ensure_ascii=False) for row in rows) + '\n]\n'


def commands_text() -> str:
  """Returns docs/commands.md: what every command prints with --help."""
  parts = ['# Commands', '', '`paxlite COMMAND --help` prints the same.']
  for group, members in groups().items():
    parts += ['', f'## {group}']
    for command in members:
      parts += ['', f'### paxlite {command.name}', '', '```text', help_of(command), '```']
  return '\n'.join(parts) + '\n'


def help_of(command: Command) -> str:
  if command.parser is None:  # the harness has its own options
    return ast.get_docstring(ast.parse((PACKAGE / 'eval/commands/lm_eval.py').read_text()))
  return command.parser.format_help().strip().removeprefix('usage: ')


def test_every_command_is_described():
  assert COMMANDS_PAGE.read_text() == commands_text(), UPDATE
  for command in commands().values():
    lines = help_of(command).splitlines()
    assert max(map(len, lines)) <= 100, f'{command.name}: wider than a screen'
    assert command.name == 'lm-eval' or {'Example:', 'Examples:'} & {*lines}, command.name


def test_every_attribute_is_described():
  assert attributes.INDEX.read_text() == attributes_text(), UPDATE
  assert ATTRIBUTES_PAGE.read_text() == attributes.page(attributes.described()), UPDATE
  assert [row['name'] for row in attributes.described() if not row['meaning']] == []


def test_every_experiment_is_what_it_was():
  found = {path.stem: without_needs(path.read_text()) for path in GOLDEN.glob('*.txt')}
  texts = golden_texts(has_needs=False)
  assert texts.keys() == found.keys(), UPDATE
  changes = [x for f in texts for x in difference(found[f].splitlines(), texts[f].splitlines())]
  assert changes == [], UPDATE
  assert texts == found, UPDATE


@pytest.mark.cases(fast=0, slow=2)
@pytest.mark.slow
@pytest.mark.parametrize(
  'module', [*FIRST, *sorted({path.stem for path in GOLDEN.glob('*.txt')} - {*FIRST})]
)
def test_every_experiment_needs_what_it_needed(module):
  """Parameters, memory and FLOPs, for which the models are traced."""
  path = GOLDEN / f'{module}.txt'
  assert golden_texts(only=module)[module] == path.read_text(), UPDATE


def test_the_table_has_the_experiments():
  rows = json.loads(tools.INDEX.read_text())
  assert [row[1] for row in rows] == list(experiments()), UPDATE


@pytest.mark.exhaustive  # all models are traced, for their numbers of parameters
def test_the_table_is_that_of_the_experiments():
  """The table is read from a file, so that it is printed immediately."""
  assert tools.INDEX.read_text() == index_text(), UPDATE


if __name__ == '__main__' and '--update' in sys.argv:
  for old in GOLDEN.glob('*.txt'):
    old.unlink()
  tools.INDEX.write_text(index_text())
  attributes.INDEX.write_text(attributes_text())
  COMMANDS_PAGE.write_text(commands_text())
  ATTRIBUTES_PAGE.write_text(attributes.page(attributes.described()))
  for family, text in golden_texts().items():
    (GOLDEN / f'{family}.txt').write_text(text)
