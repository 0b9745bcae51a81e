"""Leaves can be cut off: pretraining needs none of them, and the core imports none."""

import pathlib

import pytest

from paxlite import extensions
from tests.support import runs

PACKAGE = runs.ROOT / 'paxlite'
LEAVES = [f'paxlite.{name}' for name in extensions.BUILT_IN]


def families() -> list[str]:
  """Returns the packages of families of models."""
  folders = {path.parent for path in (PACKAGE / 'experiments').glob('*/__init__.py')}
  return sorted(f'paxlite.experiments.{f.name}' for f in folders if f.name != 'parts')


def results(folder: pathlib.Path) -> list:
  """Returns the losses of all steps, and those of the evaluations."""
  evaluated = [r['avg_xent'] for r in runs.records(folder, 'eval_metrics.jsonl')]
  return [*runs.losses(folder).values(), *evaluated]


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
  """What a run gives in which nothing is absent."""
  folder = tmp_path_factory.mktemp('whole')
  runs.module('tests.support.without', '', str(folder))
  return results(folder)


@pytest.mark.slow
@pytest.mark.cases(fast=0, slow=2)
@pytest.mark.parametrize('package', [*LEAVES, *families()])
def test_pretraining_needs_no_leaf(package, whole, tmp_path):
  runs.module('tests.support.without', package, str(tmp_path))
  assert results(tmp_path) == whole
