"""Functions of a user run in processes; what goes wrong is one line."""

import time

import pytest

from paxlite.core.errors import UserError
from paxlite.reinforcement.user_processes import Call, UserProcesses

PATH = 'tests.unit.reinforcement.my_rewards'


@pytest.fixture
def processes():
  found = UserProcesses(2, 2.0)
  yield found
  found.close()


def call(name, answer='abc', method=None):
  return Call(f'{PATH}.{name}', method, [{'more': 1}, answer])


def test_results_come_in_order(processes):
  answers = [call('length', 'x' * n) for n in (5, 1, 3, 2)]
  assert processes.results(answers) == [6, 2, 4, 3]
  messages = [{'role': 'assistant', 'content': 'a'}]
  assert processes.results([call('Counting', messages, 'reply')]) == ['again 1']


@pytest.mark.parametrize(
  ('name', 'match'),
  [
    ('raises', r'raises raised ValueError: no reward for abc \(my_rewards.py:\d+\)'),
    ('hangs', r'hangs was not done after 2 seconds \(REWARD_TIMEOUT\)'),
    ('ends', 'ends ended its process with the exit status 3'),
    ('is_missing', "raised AttributeError: .*has no attribute 'is_missing'"),
  ],
)
def test_what_goes_wrong_is_one_line(processes, name, match):
  with pytest.raises(UserError, match=match):
    processes.results([call(name)])
  assert processes.results([call('length'), call('length', '')]) == [4, 1]  # others go on


def test_no_process_is_left(processes):
  processes.results([call('length')])
  running = [worker._process for worker in processes._workers if worker._process]
  processes.close()
  time.sleep(0.1)
  assert running
  assert all(process.poll() is not None for process in running)
