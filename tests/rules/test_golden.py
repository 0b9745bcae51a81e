"""Notices every change of an experiment, by digests in the listing.json of each folder.

`python -m tests.rules.test_golden --update [PACKAGE …]` rewrites them, the rows of `paxlite list`
and the attributes of the docs. `--against COMMIT [PACKAGE …]` prints what differs from a commit,
such as HEAD, as lines of text; `--needs` adds parameters, memory and FLOPs.

The text of an experiment is what differs from the class whose model it changes, and so on up to
LanguageModel, with the defaults of the templates that this class has not. So the digests of a
family depend on no other family but those that it extends, and a default of all models changes one
digest.
"""

import argparse
import ast
import functools
import hashlib
import importlib
import itertools
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator

import fiddle as fdl
import pytest

from paxlite import extensions
from paxlite.config.templates import config_text
from paxlite.core.extension import Command, imported
from paxlite.experiments import parts
from paxlite.experiments.base import Experiment, full_name
from paxlite.experiments.demo import TinyGPT
from paxlite.experiments.description import configs, requirements
from paxlite.experiments.language_model import LanguageModel
from paxlite.experiments.parts.part import Part
from paxlite.experiments.registry import experiments
from paxlite.experiments.rows import Rows
from paxlite.tools import attributes, listings
from paxlite.tools import experiments as tools
from paxlite.tools.commands import commands, groups
from paxlite.weights.family_tables import FAMILIES
from tests.support import config_changes, runs

FOLDERS = listings.folders()
ATTRIBUTES_PAGE = runs.ROOT / 'docs' / 'attributes.md'
COMMANDS_PAGE = runs.ROOT / 'docs' / 'commands.md'
EVERYWHERE = re.compile(r'^  (-h, --help +print this help|NAME=VALUE +attribute; .*)\n', re.M)
OPTION = re.compile(r'^  --.*\n(?: {8}.*\n)*', re.M)  # with its further lines
PACKAGE = runs.ROOT / 'paxlite'
_NEEDS: dict[tuple, list[str]] = {}
FIRST = 'paxlite.experiments.gpt', 'paxlite.experiments.llama'  # what make test-slow traces
_DEVICE = 'per device:'
_NEEDED = 'parameters', _DEVICE, 'global batch', 'model FLOPs'
UPDATE = 'python -m tests.rules.test_golden --update, if this is meant; --against HEAD shows it'


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


def text_of(cls: type[Experiment], base: type[Experiment] | None) -> list[str]:
  """Returns lines for what differs from the class `base`; None: from declarations."""
  experiment = built(cls)
  lines = [f'== {full_name(cls)} (from {full_name(base)})' if base else '==']
  backend = f'backend {experiment.backend}'
  lines += [] if base and backend == f'backend {built(base).backend}' else [backend]
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
  lines += defaults_of(cls, templates_of(base) if base else set())
  return [x.replace(str(PACKAGE), 'paxlite') for x in lines]


@functools.cache
def templates_of(cls: type[Experiment]) -> set[object]:
  """Returns the classes that the configs of an experiment make."""
  return set(config_changes.classes(configs_of(cls)))


def defaults_of(cls: type[Experiment], known: set[object]) -> Iterator[str]:
  """Yields the defaults of the classes that its configs make, but for those that are known."""
  for kind in sorted(templates_of(cls) - known, key=config_changes.name_of):
    yield from config_changes.defaults(kind)


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


def package_of(module: str) -> str:
  """Returns the package whose listing has what a module declares: that of a family, or CORE."""
  family = '.'.join(module.split('.')[:3])
  return family if family in FOLDERS else listings.CORE


@functools.cache
def classes() -> dict[str, list[type[Experiment]]]:
  """Returns all experiments and the classes that they change, by the package that lists them.

  Experiments that fine-tune any model are there with a small one.
  """
  published = (family.experiment for family in FAMILIES.values())  # some have no sizes
  found = [c.of_values({'MODEL': 'SmolLM135M'}) for c in experiments().values()]
  for cls in (found := [*dict.fromkeys([*found, *published])]):  # and their parent classes
    if cls is not LanguageModel and (base := parent(cls)) not in found:
      found.append(base)
  by_package: dict[str, list[type[Experiment]]] = {}
  for cls in sorted(found, key=full_name):
    by_package.setdefault(package_of(cls.__module__), []).append(cls)
  return by_package


def texts(packages: Iterable[str] = (), has_needs: bool = False) -> dict[str, list[str]]:
  """Returns the lines of each class.

  Args:
    packages: Those whose classes are meant; none: all.
    has_needs: Whether parameters, memory and FLOPs are among the lines: models are traced for them.
  """
  return {
    full_name(cls): text_of(cls, None if cls is LanguageModel else parent(cls))
    + (needs_of(built(cls)) if has_needs else [])
    for package, found in classes().items()
    for cls in found
    if package in (packages or classes())
  }


def digest(lines: Iterable[str]) -> str:
  return hashlib.sha256('\n'.join(lines).encode()).hexdigest()[:12]


def digests(package: str) -> dict[str, str]:
  """Returns the digest of each class of a package, by its name there."""
  return {n.removeprefix(f'{package}.'): digest(x) for n, x in texts([package]).items()}


def digests_of_needs(package: str) -> dict[str, str]:
  found = classes().get(package, ())
  return {full_name(c).removeprefix(f'{package}.'): digest(needs_of(built(c))) for c in found}


def rows(package: str) -> list[list[str]]:
  """Returns the rows of `paxlite list`; models are traced for their numbers of parameters."""
  return [tools.row(cls) for cls in experiments().values() if package_of(cls.__module__) == package]


def attributes_of(package: str) -> list[dict[str, str]]:
  """Returns the attributes that a package declares; CORE those of all that is no family's."""
  found = [row for row in described() if package_of(row['where'].rpartition('.')[0]) == package]
  return found if package == listings.CORE else sorted(found, key=lambda row: row['name'])


@functools.cache
def described() -> list[dict[str, str]]:
  """Returns all attributes: first those of the core, whose subjects no family puts in order."""
  experiments()
  for module in pkgutil.iter_modules(parts.__path__, f'{parts.__name__}.'):
    importlib.import_module(module.name)
  for part in (name for extension in extensions.found() for name in extension.options):
    imported(part)
  found: list[type[Part]] = [Part]
  for cls in found:
    found += cls.__subclasses__()
  is_of_family = lambda cls: package_of(cls.__module__) != listings.CORE
  ours = {cls for cls in found if cls.__module__.startswith('paxlite.')}
  ordered = sorted(ours, key=lambda c: (is_of_family(c), len(c.__mro__), full_name(c)))
  return attributes.describe([Rows, LanguageModel, *ordered])


def listing(package: str) -> str:
  """Returns the text of a listing.json, with a line for each experiment, attribute and class."""
  needs = digests_of_needs(package)
  line = functools.partial(json.dumps, ensure_ascii=False)
  inside = lambda lines: '\n' + ',\n'.join(lines) + '\n' if lines else ''
  named = [f'{line(n)}: {line(f"{d} {needs[n]}")}' for n, d in digests(package).items()]
  values = (
    f'"experiments": [{inside([*map(line, rows(package))])}]',
    f'"attributes": [{inside([*map(line, attributes_of(package))])}]',
    f'"digests": {{{inside(named)}}}',
  )
  return f'{{{inside(values)}}}\n'


def stored(package: str) -> dict:
  path = FOLDERS[package] / listings.NAME
  return json.loads(path.read_text()) if path.exists() else {}


def commands_text() -> str:
  """Returns docs/commands.md: what every command prints with --help; shared options stand once."""
  of_runs = {c.name: f'{help_of(c)}\n' for c in commands().values() if c.is_run}
  first = next(iter(of_runs.values()))
  shared = [x for x in OPTION.findall(first) if all(x in text for text in of_runs.values())]
  said = '`paxlite COMMAND --help` prints the same. NAME=VALUE sets an attribute. Runs'
  parts = ['# Commands', '', f'{said} ({", ".join(of_runs)}) also take:', '']
  parts += ['```text', ''.join(shared).rstrip(), '```']
  for group, members in groups().items():
    parts += ['', f'## {group}']
    for command in members:
      text = EVERYWHERE.sub('', f'{help_of(command)}\n')
      if command.is_run:
        text = OPTION.sub(lambda m: '' if m[0] in shared else m[0], text)
      text = text.rstrip().removesuffix('\n\noptions:')
      parts += ['', f'### paxlite {command.name}', '', '```text', text, '```']
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
  found = {package: attributes_of(package) for package in FOLDERS}
  assert found == {package: stored(package).get('attributes') for package in found}, UPDATE
  assert ATTRIBUTES_PAGE.read_text() == attributes.page(found[listings.CORE]), UPDATE
  assert [row['name'] for rows in found.values() for row in rows if not row['meaning']] == []


def test_every_experiment_is_what_it_was():
  found = {p: digests(p) for p in FOLDERS}
  known = {p: {n: d.split()[0] for n, d in stored(p).get('digests', {}).items()} for p in found}
  assert found == known, UPDATE


@pytest.mark.cases(fast=0, slow=2)
@pytest.mark.slow
@pytest.mark.parametrize('package', [*FIRST, *sorted(FOLDERS.keys() - {*FIRST})])
def test_every_experiment_needs_what_it_needed(package):
  """Parameters, memory and FLOPs, for which the models are traced."""
  known = {name: d.split()[1] for name, d in stored(package).get('digests', {}).items()}
  assert digests_of_needs(package) == known, f'{UPDATE} --needs'


def test_the_table_has_the_experiments():
  assert [row[1] for row in listings.experiments()] == list(experiments()), UPDATE


@pytest.mark.exhaustive  # all models are traced, for their numbers of parameters
def test_the_table_is_that_of_the_experiments():
  """The table is read from files, so that it is printed immediately."""
  found = {package: rows(package) for package in FOLDERS}
  assert found == {package: stored(package).get('experiments') for package in found}, UPDATE


@pytest.mark.slow
def test_a_difference_from_a_commit_is_shown(monkeypatch, capsys):
  def forget():
    for known in (built, configs_of, templates_of):
      known.cache_clear()

  package = f'{listings.CORE}.demo'
  before = digests(package)
  monkeypatch.setattr(TinyGPT, 'LEARNING_RATE', 0.125)
  forget()
  assert {name for name, d in digests(package).items() if d != before[name]} == {'TinyGPT'}
  show_differences('HEAD', [package], has_needs=False)
  forget()
  assert '  + LEARNING_RATE = 0.125\n' in capsys.readouterr().out


def show_differences(commit: str, packages: list[str], has_needs: bool) -> None:
  """Prints what differs from a commit, whose own code runs in a tree of its own."""
  new = texts(packages, has_needs)
  with tempfile.TemporaryDirectory() as folder:
    tree = f'{folder}/tree'
    git = lambda *args: subprocess.run(['git', 'worktree', *args], cwd=runs.ROOT, check=True)
    git('add', '--quiet', '--detach', tree, commit)
    try:
      options = [*packages, *(['--needs'] if has_needs else [])]
      done = subprocess.run(
        [sys.executable, '-m', 'tests.rules.test_golden', '--texts', *options],
        cwd=tree, env={**os.environ, 'PYTHONPATH': tree}, stdout=subprocess.PIPE, check=True,
      )  # fmt: skip
    finally:
      git('remove', '--force', tree)
  if not done.stdout:
    sys.exit(f'{commit} has no such tool: name a later commit')
  old = json.loads(done.stdout)
  found = {name: difference(old.get(name, []), new.get(name, [])) for name in sorted({*old, *new})}
  for name, lines in found.items():
    if lines:
      print(name, *lines, sep='\n  ')
  if not any(found.values()):
    print(f'Nothing differs from {commit}. Other versions of packages may change digests, too.')


def update(packages: Iterable[str]) -> None:
  """Rewrites the listings of packages, or all, and the pages."""
  for package in packages or FOLDERS:
    (FOLDERS[package] / listings.NAME).write_text(listing(package))
  COMMANDS_PAGE.write_text(commands_text())
  ATTRIBUTES_PAGE.write_text(attributes.page(attributes_of(listings.CORE)))


if __name__ == '__main__':
  asked = argparse.ArgumentParser()
  for flag in ('--update', '--texts', '--needs'):
    asked.add_argument(flag, action='store_true')
  asked.add_argument('--against', metavar='COMMIT')
  asked.add_argument('packages', nargs='*', help='such as paxlite.experiments.gpt; none: all')
  args = asked.parse_args()
  if args.update:
    update(args.packages)
  elif args.texts:
    print(json.dumps(texts(args.packages, args.needs)))
  elif args.against:
    show_differences(args.against, args.packages, args.needs)
