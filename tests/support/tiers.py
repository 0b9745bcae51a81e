"""Chooses which cases of a test run in `make test`, in `make test-slow`, or in neither.

    @pytest.mark.cases(fast=2, slow=3)
    @pytest.mark.parametrize(…)

Two cases run in `make test`, three in `make test-slow`, and all in `make test-exhaustive`, which is
for a change of what the test is about, and once a week. A case is chosen for the values of its
parameters that no earlier one has, so that few cases have each value once.
"""

import collections
from collections.abc import Iterable, Sequence

import pytest


def assign(items: Iterable[pytest.Item]) -> None:
  """Marks the cases of each test that has the mark `cases` as slow or exhaustive."""
  tests: dict[str, list[pytest.Function]] = collections.defaultdict(list)
  for item in items:
    if isinstance(item, pytest.Function) and item.get_closest_marker('cases'):
      if not hasattr(item, 'callspec'):
        raise pytest.UsageError(f'{item.nodeid} has the mark cases, and no parameters')
      tests[item.nodeid.partition('[')[0]].append(item)
  for cases in tests.values():
    mark = cases[0].get_closest_marker('cases')
    assert mark is not None
    left = _counts(cases[0].nodeid, *mark.args, **mark.kwargs)
    for case in _by_news(cases):
      tiers = ['slow'] if case.get_closest_marker('slow') else ['fast', 'slow']
      tier = next((tier for tier in tiers if left[tier]), 'exhaustive')
      if tier != 'exhaustive':
        left[tier] -= 1
      if tier != 'fast':
        case.add_marker(tier)


def _counts(test: str, *, fast: int = 0, slow: int = 0) -> dict[str, int]:
  """Returns how many cases are in each tier; raises TypeError for another argument."""
  if not fast + slow:
    raise pytest.UsageError(f'{test}: the mark cases leaves all of them to the exhaustive tier')
  return {'fast': fast, 'slow': slow}


def _by_news(cases: Sequence[pytest.Function]) -> list[pytest.Function]:
  """Returns the cases, each one as that with the most values of parameters that are new."""
  left, seen, order = list(cases), set[tuple[str, str]](), []
  while left:
    best = max(left, key=lambda case: len(_values(case) - seen))
    seen |= _values(best)
    left.remove(best)
    order.append(best)
  return order


def _values(case: pytest.Function) -> set[tuple[str, str]]:
  return {(name, repr(value)) for name, value in case.callspec.params.items()}
