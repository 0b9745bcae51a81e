"""Leaves can be cut off: pretraining needs none of them, and the core imports none."""

import json
import pathlib
import subprocess
import sys

import pytest

from paxlite import extensions
from tests.rules.test_structure import MODULES, imports
from tests.support import runs

PACKAGE = runs.ROOT / 'paxlite'
LEAVES = [f'paxlite.{name}' for name in extensions.BUILT_IN]


def families() -> list[str]:
  """Returns the packages of families of models."""
  folders = {path.parent for path in (PACKAGE / 'experiments').glob('*/__init__.py')}
  return sorted(f'paxlite.experiments.{f.name}' for f in folders if f.name != 'parts')


TRAINED = 'paxlite.experiments.demo', 'paxlite.experiments.gpt'  # TinyGPT is one of them
CUT_OFF = [*LEAVES, *(package for package in families() if package not in TRAINED)]


def trained_without(package: str, folder: pathlib.Path) -> list:
  """Trains in a process of its own; returns the losses of all steps, and of the evaluations."""
  command = [sys.executable, '-m', 'tests.support.without', package, str(folder)]
  done = subprocess.run(
    command, env=runs.environment(), cwd=runs.ROOT, capture_output=True, text=True, check=False
  )
  assert done.returncode == 0, done.stderr
  evaluated = [r['avg_xent'] for r in runs.records(folder, 'eval_metrics.jsonl')]
  return [*runs.losses(folder).values(), *evaluated]


def test_the_core_imports_no_leaf():
  """Folders of experiments are leaves, too."""
  of_leaf = lambda module: f'{module}.'.startswith(tuple(f'{leaf}.' for leaf in LEAVES))
  of_family = lambda module: f'{module}.'.startswith(tuple(f'{f}.' for f in families()))
  wrong = {
    f'{name} imports {module}'
    for name, path in MODULES.items()
    if not of_leaf(name) and not of_family(name)
    for module, _ in imports(path)
    if of_leaf(module)
  }
  assert wrong == set()


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
  """What a run gives in which nothing is absent."""
  folder = tmp_path_factory.mktemp('whole')
  return trained_without('', folder)


@pytest.mark.slow
@pytest.mark.cases(fast=0, slow=2)
@pytest.mark.parametrize('package', CUT_OFF)
def test_pretraining_needs_no_leaf(package, whole, tmp_path):
  assert trained_without(package, tmp_path) == whole


def test_a_leaf_imports_only_those_that_it_needs():
  """With those that these need. What is imported by name, by a hook, may be absent."""
  leaves = {leaf.name: leaf for leaf in extensions.found() if leaf.name in extensions.BUILT_IN}

  def needed(name):
    return {name}.union(*map(needed, leaves[name].needs))

  leaf_of = lambda module: next((n for n in leaves if module.startswith(f'paxlite.{n}.')), None)
  wrong = {
    f'{name} imports {module}'
    for name, path in MODULES.items()
    if leaf_of(name)
    for module, _ in imports(path)
    if leaf_of(f'{module}.') and leaf_of(f'{module}.') not in needed(leaf_of(name))
  }
  assert wrong == set()


@pytest.mark.slow
@pytest.mark.cases(fast=0, slow=2)
@pytest.mark.parametrize('leaf', extensions.BUILT_IN)
def test_a_command_works_or_names_the_leaf_that_is_absent(leaf):
  command = [sys.executable, '-m', 'tests.support.without', f'paxlite.{leaf}', '--help']
  done = subprocess.run(
    command, env=runs.environment(), cwd=runs.ROOT, capture_output=True, text=True, check=True
  )
  of_core = {'train', 'eval', 'show', 'list'}
  ends = json.loads(done.stdout.splitlines()[-1])
  assert len(ends) > len(of_core)
  for name, (code, said) in ends.items():
    absent = f'error: paxlite {name} needs the extension {leaf}, which is not installed\n'
    assert (code, said) in [(0, ''), *([] if name in of_core else [(2, absent)])], name
    if name in extensions.OFFERED[leaf]:
      assert code == 2
