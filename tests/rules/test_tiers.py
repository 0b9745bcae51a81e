"""Checks which cases of a parametrized test run in which of the tiers."""

import itertools
import json
import re
import shlex
import subprocess
import sys
import tomllib

import pytest

from tests.support import runs, shards

pytest_plugins = ('pytester',)

TEST = """
import pytest

@pytest.mark.cases(fast=2, slow=1)
@pytest.mark.parametrize('a', [1, 2])
@pytest.mark.parametrize('b', [1, 2])
def test_of_two(a, b):
  pass
"""


def collected(pytester, expression):
  result = pytester.runpytest_inprocess('-q', '--collect-only', '-m', expression)
  return {line.split('::')[1] for line in result.outlines if '::' in line}


def test_each_value_is_fast_once_and_all_cases_run_in_one_tier(pytester):
  pytester.makeini(
    '[pytest]\nmarkers =\n  slow: s\n  exhaustive: e\n  cases(fast, slow): c\naddopts = -p no:xdist'
  )
  pytester.makeconftest("""
import pytest
from tests.support import tiers

@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
  tiers.assign(items)
""")
  pytester.makepyfile(TEST)
  fast = collected(pytester, 'not slow and not exhaustive')
  slow = collected(pytester, 'slow and not exhaustive')
  rest = collected(pytester, 'exhaustive')
  assert fast == {'test_of_two[1-1]', 'test_of_two[2-2]'}
  assert (len(slow), len(rest)) == (1, 1)
  assert len(fast | slow | rest) == 4


COLLECT = """
import contextlib, json, sys
import pytest
from _pytest.mark import deselect_by_mark

class Names:  # importing all tests takes long, so that -m chooses several times
  def pytest_collection_finish(self, session):
    self.found = []
    for session.config.option.markexpr in json.loads(sys.argv[1]):
      items = [*session.items]
      deselect_by_mark(items, session.config)
      self.found.append([item.nodeid for item in items])

names = Names()
with contextlib.redirect_stdout(sys.stderr):
  pytest.main(['--collect-only', '-qq', '-m', 'slow or not slow'], plugins=[names])
for found in names.found:
  print(json.dumps(found))
"""


@pytest.mark.slow
def test_each_test_runs_in_one_tier():
  """That is, by the expressions of the Makefile and of pyproject.toml."""
  options = tomllib.loads((runs.ROOT / 'pyproject.toml').read_text())['tool']['pytest']
  fast = shlex.split(options['ini_options']['addopts'])[-1]
  makefile = (runs.ROOT / 'Makefile').read_text()
  rest = re.findall(r"\$\(PYTEST\) -m ('[^']+'|\w+) ", makefile)
  expressions = [fast, *(x.strip("'") for x in rest)]
  assert len(expressions) == 3
  found = subprocess.run(
    [sys.executable, '-c', COLLECT, json.dumps([*expressions, 'slow or not slow'])],
    capture_output=True, text=True, check=True, cwd=runs.ROOT, env=runs.environment(),
  ).stdout  # fmt: skip
  *tiers, every = map(json.loads, found.splitlines())
  assert all(tiers)
  assert sorted(itertools.chain(*tiers)) == sorted(every)
  assert len({*every}) == len(every)


class Item:
  def __init__(self, nodeid):
    self.nodeid = nodeid


@pytest.mark.parametrize('parts', [1, 2, 12])
def test_parts_hold_each_case_once_and_are_about_as_large(parts):
  items = [Item(f'tests/test_{i % 100}.py::test[{i}]') for i in range(1500)]
  found = [shards.chosen(items, part, parts) for part in range(1, parts + 1)]
  assert sorted(map(id, itertools.chain(*found))) == sorted(map(id, items))
  assert max(map(len, found)) < 1.4 * min(map(len, found))


@pytest.mark.parametrize('wrong', ['0/3', '4/3', '3', 'x/y', ''])
def test_a_part_is_a_number_of_others(wrong):
  with pytest.raises(pytest.UsageError, match='give I/N'):
    shards.parsed(wrong)
