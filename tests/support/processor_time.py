"""`pytest -p tests.support.processor_time …`: writes what each test costs to test_times.txt.

A line has the processor seconds of the test with all processes that it starts, its wall seconds and
its name. Other work on the machine changes wall seconds much, and processor seconds little.
"""

import collections
import os
import pathlib
import time

import pytest

FILE = pathlib.Path('test_times.txt')
_TICKS = os.sysconf('SC_CLK_TCK')


def _processor_seconds() -> float:
  """Returns the seconds of this process and of all that it started, with those that have ended."""
  children, ticks = collections.defaultdict(list), {}
  for stat in pathlib.Path('/proc').glob('[0-9]*/stat'):
    try:
      fields = stat.read_text().rpartition(')')[2].split()
    except OSError:  # it has ended
      continue
    number = int(stat.parent.name)
    children[int(fields[1])].append(number)
    ticks[number] = sum(map(int, fields[11:15]))
  found, todo = 0, [os.getpid()]
  while todo:
    number = todo.pop()
    found += ticks.get(number, 0)
    todo += children[number]
  return found / _TICKS


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
  processor, wall = _processor_seconds(), time.monotonic()
  result = yield
  with FILE.open('a') as f:
    f.write(f'{_processor_seconds() - processor:.1f} {time.monotonic() - wall:.1f} {item.nodeid}\n')
  return result
