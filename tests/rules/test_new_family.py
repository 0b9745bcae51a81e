"""A new family is its folder: what is generated outside does not change for it."""

import shutil
import subprocess
import sys

import pytest

from paxlite.tools import listings
from tests.support import runs

YOUNG = 'seed_oss', 'exaone', 'minimax_m2'  # none extends another


@pytest.mark.slow
@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.parametrize('family', YOUNG)
def test_nothing_that_is_generated_outside_has_a_family(family, tmp_path):
  """Without its folder, the rules pass on all other files as they are."""
  skipped = shutil.ignore_patterns('__pycache__', family)
  for name in ('paxlite', 'docs', 'tests'):
    shutil.copytree(runs.ROOT / name, tmp_path / name, ignore=skipped)
  for path in [*runs.ROOT.glob('*.md'), runs.ROOT / 'pyproject.toml']:
    shutil.copy(path, tmp_path)
  assert f'{listings.CORE}.{family}' in listings.folders()
  rules = ('golden', 'keys_of_models', 'structure', 'names')
  done = subprocess.run(
    [sys.executable, '-m', 'pytest', '-q', *(f'tests/rules/test_{name}.py' for name in rules)],
    cwd=tmp_path, env=runs.environment() | {'PYTHONPATH': str(tmp_path)},
    capture_output=True, text=True, check=False,
  )  # fmt: skip
  assert done.returncode == 0, done.stdout[-4000:]
