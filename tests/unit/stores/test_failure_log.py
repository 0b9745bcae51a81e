"""What is said of a store that fails."""

import logging
import time

import pytest

from paxlite.stores.failure_log import FailureLog
from paxlite.stores.store_errors import StoreError


@pytest.fixture
def said(caplog):
  caplog.set_level(logging.WARNING)
  return lambda: [r.getMessage() for r in caplog.records]


def refused(i):
  return StoreError(f'gs://bkt/run/{i}', 'the store refuses these credentials')


def test_a_failure_of_many_objects_is_said_once(said):
  failures = FailureLog('gs://bkt/run')
  for i in range(50):
    assert failures.failed(refused(i)) == 'the store refuses these credentials'
  failures.passed()
  assert said() == [
    'gs://bkt/run cannot be written, training continues: the store refuses these credentials',
    'gs://bkt/run can be written again',
  ]


def test_a_store_that_comes_and_goes_is_not_said_each_time(said, monkeypatch):
  failures = FailureLog('gs://bkt/run')
  for _ in range(50):
    failures.failed(OSError(5, 'the store answered 503'))
    failures.passed()
  assert len(said()) == 2
  failures.failed(OSError(5, 'the store answered 503'))
  now = time.monotonic()
  monkeypatch.setattr(time, 'monotonic', lambda: now + 61)  # no success for a minute
  failures.failed(OSError(5, 'the store answered 503'))
  assert len(said()) == 3
  assert said()[-1].endswith('503 (50 more failures were not shown)')
  failures.failed(OSError(5, 'another reason'))
  assert said()[-1].endswith(': another reason')
