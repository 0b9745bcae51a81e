"""Compares every experiment, as text, with a golden file, so that a change of one is reviewed.

`python -m tests.rules.test_golden --update` rewrites rules/golden/ and the table of the tool.
The first class of a module is written in full. Each other class is written as its difference from
its parent, or from that one.
"""

import ast
import json
import pathlib
import sys

import fiddle as fdl
import pytest

from paxlite.config.templates import config_text
from paxlite.experiments import datasets
from paxlite.experiments.base import Experiment
from paxlite.experiments.description import configs_text, requirements, values_text
from paxlite.experiments.language_model import LanguageModel
from paxlite.experiments.registry import experiments
from paxlite.tools import attributes
from paxlite.tools import experiments as tools
from paxlite.tools.commands import COMMANDS, GROUPS, Command
from tests.support import runs

GOLDEN = pathlib.Path(__file__).parent / 'golden'
ATTRIBUTES_PAGE = runs.ROOT / 'docs' / 'attributes.md'
COMMANDS_PAGE = runs.ROOT / 'docs' / 'commands.md'
PACKAGE = runs.ROOT / 'paxlite'
_NEEDS: dict[tuple, list[str]] = {}
_NEEDED = 'parameters', 'per device', 'global batch', 'model FLOPs'
UPDATE = 'python -m tests.rules.test_golden --update, if this is meant'


def parent(cls: type[Experiment]) -> type[Experiment] | None:
  """Returns the class whose model `cls` changes; None for the first class of a family."""
  sizes = lambda c: set(c.__mro__) - set(LanguageModel.__mro__)
  models = (c for c in cls.__mro__[1:] if any('MODEL_DIMS' in vars(b) for b in sizes(c)))
  return next(models, None)


def text_of(cls: type[Experiment], has_needs: bool) -> list[str]:
  experiment = fdl.build(cls.config())
  needs = needs_of(experiment) if has_needs else []
  text = '\n'.join([values_text(experiment), configs_text(experiment), *needs])
  return text.replace(str(runs.ROOT / 'paxlite'), 'paxlite').splitlines()


def is_config(line: str) -> bool:
  return line.startswith(('task', 'train_input', 'eval_inputs'))


def needs_of(experiment: Experiment) -> list[str]:
  """Returns parameters, memory and FLOPs; experiments that differ only in data share one result."""
  e = experiment
  key = config_text(e.build_task()), str(e.mesh_sizes), e.batch_size, e.MAX_SEQ_LEN
  if key not in _NEEDS:
    _NEEDS[key] = [x for x in requirements(e).splitlines() if x.startswith(_NEEDED)]
  return _NEEDS[key]


def difference(old: list[str], new: list[str]) -> list[str]:
  """Returns removed and added lines; each has the name or path of its attribute."""
  gone, added = set(old) - set(new), set(new) - set(old)
  return [f'- {x}' for x in old if x in gone] + [f'+ {x}' for x in new if x in added]


def golden_texts(has_needs: bool = True) -> dict[str, str]:
  """Returns the text of the experiments of each module that has families, by the module's name.

  Experiments that fine-tune any model are there with a small one. Parameters, memory and FLOPs, for
  which models are traced, can be left out.
  """
  classes = [c.of_values({'MODEL': 'SmolLM135M'}) for c in experiments().values()]
  for cls in classes:  # and their parent classes
    if (base := parent(cls)) and base not in classes:
      classes.append(base)
  # the table of `paxlite list` has the parameters of a size
  families = {cls.__bases__: cls for cls in reversed(classes)}.values()
  whole = {
    cls: text_of(cls, has_needs and (bool(parent(cls)) or cls in families)) for cls in classes
  }
  firsts: dict[str, type] = {}
  modules: dict[str, dict[str, list[str]]] = {}
  for cls, lines in sorted(whole.items(), key=lambda item: item[0].__name__):
    name, base = f'{cls.__module__}.{cls.__qualname__}', parent(cls)
    root = cls
    while above := parent(root):
      root = above
    module = root.__module__.rpartition('.')[2]
    base = base or firsts.setdefault(f'{module} {cls.__bases__}', cls)
    if base is not cls:
      name += f' (from {base.__module__}.{base.__qualname__})'
      lines = difference(whole[base], lines)
      if parent(cls) is None:  # the configs of one size stand for those of the others
        lines = [line for line in lines if not is_config(line[2:])]
    modules.setdefault(module, {})[name] = lines
  return {
    module: '\n'.join(
      f'== {name}\n' + ''.join(f'{x}\n' for x in lines) for name, lines in sorted(members.items())
    )
    for module, members in modules.items()
  }


def without_needs(text: str) -> str:
  lines = text.splitlines(keepends=True)
  return ''.join(
    x for x in lines if not x.removeprefix('- ').removeprefix('+ ').startswith(_NEEDED)
  )


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
  rows = attributes.describe([*experiments().values(), *sources])
  return '[\n' + ',\n'.join(json.dumps(row, ensure_ascii=False) for row in rows) + '\n]\n'


def commands_text() -> str:
  """Returns docs/commands.md: what every command prints with --help."""
  parts = ['# Commands', '', '`paxlite COMMAND --help` prints the same.']
  for group, commands in GROUPS.items():
    parts += ['', f'## {group}']
    for command in commands:
      parts += ['', f'### paxlite {command.name}', '', '```text', help_of(command), '```']
  return '\n'.join(parts) + '\n'


def help_of(command: Command) -> str:
  if command.parser is None:  # the harness has its own options
    return ast.get_docstring(ast.parse((PACKAGE / 'tools' / 'lm_eval.py').read_text()))
  return command.parser.format_help().strip().removeprefix('usage: ')


def test_every_command_is_described():
  assert COMMANDS_PAGE.read_text() == commands_text(), UPDATE
  for command in COMMANDS.values():
    lines = help_of(command).splitlines()
    assert len(lines) <= 42, f'{command.name}: more than a screen'
    assert max(map(len, lines)) <= 100, f'{command.name}: wider than a screen'
    assert command.name == 'lm-eval' or {'Example:', 'Examples:'} & {*lines}, command.name


def test_every_attribute_is_described():
  assert attributes.INDEX.read_text() == attributes_text(), UPDATE
  assert ATTRIBUTES_PAGE.read_text() == attributes.page(attributes.described()), UPDATE
  assert [row['name'] for row in attributes.described() if not row['meaning']] == []


@pytest.mark.parametrize('has_needs', [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_experiment_is_what_it_was(has_needs):
  found = {path.stem: path.read_text() for path in GOLDEN.glob('*.txt')}
  if not has_needs:
    found = {name: without_needs(text) for name, text in found.items()}
  texts = golden_texts(has_needs)
  assert texts.keys() == found.keys(), UPDATE
  changes = [x for f in texts for x in difference(found[f].splitlines(), texts[f].splitlines())]
  assert changes == [], UPDATE
  assert texts == found, UPDATE


def test_the_table_has_the_experiments():
  rows = json.loads(tools.INDEX.read_text())
  assert [row[1] for row in rows] == list(experiments()), UPDATE


@pytest.mark.slow
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
