"""A new family is its folder, and at most one file outside knows it, such as CHANGELOG.md."""

import ast
import functools
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from paxlite.tools import listings
from tests.support import runs

FAMILIES = sorted(path.parent for path in runs.ROOT.glob('paxlite/experiments/*/weights.py'))
# Those that others extend, that docs and tests have as examples, or whose layers have unit tests.
KNOWN = {
  'deepseek', 'deepseek_sparse', 'deepseek_v4', 'falcon', 'gemma', 'gemma4', 'glm', 'glm_latent',
  'gpt', 'gpt_neox', 'gpt_oss', 'granite', 'hunyuan', 'kimi', 'lfm', 'llama', 'llama4', 'ministral',
  'mixtral', 'olmo', 'phi', 'qwen', 'qwen_hybrid',
}  # fmt: skip
YOUNG = 'seed_oss', 'exaone', 'minimax_m2'  # none extends another


@functools.cache
def texts() -> dict[pathlib.Path, tuple[str, set[str]]]:
  """Returns each text of the repository, and its words."""
  return {
    path: (text := path.read_text(), {*re.findall(r'\w+', text)})
    for pattern in ('*.*', *(f'{top}/**/*.*' for top in ('paxlite', 'docs', 'tests', 'benchmarks')))
    for path in runs.ROOT.glob(pattern)
    if path.suffix in ('.py', '.md', '.json', '.txt', '.sh', '.toml')
    and path != pathlib.Path(__file__)
  }


def names_of(folder: pathlib.Path) -> tuple[set[str], list[str]]:
  """Returns what names a family: its folder, classes and values of model_type; and its titles."""
  table = (folder / 'weights.py').read_text()
  classes = ast.parse((folder / '__init__.py').read_text()).body
  types = re.findall(r"^  '(\w+)': Family\(", table, re.MULTILINE)
  titles = re.match(r'"""How the published models of (.+) are stored; see', table)[1]
  words = {folder.name, *types, *(c.name for c in classes if isinstance(c, ast.ClassDef))}
  return words, re.split(', | and ', titles)


@pytest.mark.parametrize('folder', FAMILIES, ids=lambda folder: folder.name)
def test_one_file_outside_its_folder_knows_a_family(folder):
  names, titles = names_of(folder)
  found = [
    str(path.relative_to(runs.ROOT))
    for path, (text, known) in texts().items()
    if folder not in path.parents
    if names & known or any(title in text for title in titles)
  ]
  assert len(list(folder.glob('*.*'))) <= 6
  assert (len(found) > 1) == (folder.name in KNOWN), found


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
