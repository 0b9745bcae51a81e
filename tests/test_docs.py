"""Every command in README.md and docs/ runs, and every Python example."""

import itertools
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from tests import runs

PAGES = [
  runs.ROOT / 'README.md',
  runs.ROOT / 'benchmarks' / 'README.md',
  *sorted((runs.ROOT / 'docs').glob('*.md')),
]
FAST = {'README.md', 'experiments.md', 'data.md'}
MAKE = {'make demo', 'make test'}  # tests/test_demo.py runs the first; this is the second


def blocks(page: pathlib.Path, language: str) -> list[str]:
  return re.findall(rf'^```{language}\n(.*?)^```', page.read_text(), re.DOTALL | re.MULTILINE)


def commands(page: pathlib.Path) -> list[str]:
  lines = '\n'.join(blocks(page, 'sh')).splitlines()
  return [line for line in lines if line and line not in MAKE]


@pytest.mark.parametrize(
  'page',
  [p if p.name in FAST else pytest.param(p, marks=pytest.mark.slow) for p in PAGES],
  ids=lambda p: p.parent.name + '/' + p.name,
)
def test_commands(page, tmp_path):
  """In an empty folder with the package's data where a command expects it."""
  (tmp_path / 'paxlite').symlink_to(runs.ROOT / 'paxlite')
  for name in ('README.md', 'benchmarks'):
    (tmp_path / name).symlink_to(runs.ROOT / name)
  for i, code in enumerate(blocks(page, 'python')):
    name = re.match(r'# (\w+)\.py', code)
    (tmp_path / (f'{name[1]}.py' if name else f'example_{i}.py')).write_text(code)
  for line in commands(page):
    words = shlex.split(line, comments=True)
    given = itertools.takewhile(re.compile(r'[A-Z_]+=').match, words)
    variables = dict(word.split('=', 1) for word in given)
    words = words[len(variables) :]
    if 'XLA_FLAGS' in variables:
      variables['XLA_FLAGS'] += f' {runs.QUICK_TO_COMPILE}'
    assert words[0] == 'python', line
    result = subprocess.run(
      [sys.executable, *words[1:]],
      capture_output=True,
      text=True,
      cwd=tmp_path,
      env=runs.environment() | {'PYTHONPATH': str(tmp_path)} | variables,
      timeout=300,
      check=False,
    )
    assert result.returncode == 0, f'{line}\n{result.stdout}\n{result.stderr}'


def test_the_templates_example(tmp_path):
  """docs/experiments.md's class builds and does what its text says."""
  import fiddle as fdl

  code = next(c for c in blocks(runs.ROOT / 'docs' / 'experiments.md', 'python') if 'Gated' in c)
  scope: dict = {'__name__': 'example'}
  exec(compile(code, 'example', 'exec'), scope)
  task = scope['Gated']().task()
  layer = task.model.transformer_tpl.layer_tpl
  assert layer.attention_tpl.attention_tpl.logit_cap == 30.0
  built = fdl.build(layer.ffn_tpl)
  assert built.func.__name__ == 'GatedFeedForward'


def test_links_lead_somewhere():
  for page in PAGES:
    for target in re.findall(r'\]\(([^)#:]+)\)', page.read_text()):
      assert (page.parent / target).exists(), f'{page.name}: {target}'


def test_the_tree_in_the_readme_is_the_tree():
  text = (runs.ROOT / 'README.md').read_text()
  tree = text.split('```\npaxlite/\n')[1].split('```')[0]
  for name in re.findall(r'\b[\w/]+(?:\.py|/)', tree):
    assert (runs.ROOT / 'paxlite' / name).exists(), name
