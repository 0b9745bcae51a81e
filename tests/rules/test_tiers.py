"""Checks which cases of a parametrized test run in which of the tiers."""

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
