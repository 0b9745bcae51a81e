"""Functions of a user run in processes; what goes wrong is one line."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from paxlite.core.errors import UserError
from paxlite.finetuning.reinforcement.user_processes import Call, UserProcesses
from tests.support import runs

PATH = 'tests.unit.finetuning.my_rewards'


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
    ('hangs', r'hangs did not finish within 2 seconds \(REWARD_TIMEOUT\)'),
    ('ends', 'ends ended its process with the exit status 3'),
    ('is_large', r'is_large returned more than 4 MiB'),
    ('is_missing', "raised AttributeError: .*has no attribute 'is_missing'"),
  ],
)
def test_what_goes_wrong_is_one_line(processes, name, match):
  with pytest.raises(UserError, match=match):
    processes.results([call(name)])
  assert processes.results([call('length'), call('length', '')]) == [4, 1]  # others go on


def test_a_call_has_one_answer_where_its_process_forks(processes):
  for _ in range(4):
    asked = [call('forks'), call('length'), call('length', '')]
    assert processes.results(asked) == [1.0, 4, 1]


@pytest.mark.parametrize('module', ['config', 'core', 'data', 'eval', 'stores', 'tools'])
def test_a_module_of_the_user_is_none_of_paxlites_folders(processes, module, tmp_path, monkeypatch):
  (tmp_path / f'{module}.py').write_text('def here():\n  return __file__\n')
  monkeypatch.chdir(tmp_path)
  found = processes.results([Call(f'{module}.here', None, [])])
  assert found == [str(tmp_path / f'{module}.py')]
  with pytest.raises(UserError, match=r"No module named 'no_module_here'$"):
    processes.results([Call('no_module_here.f', None, [])])  # no line of paxlite's own


def test_no_process_is_left(processes):
  processes.results([call('length')])
  running = [worker._process for worker in processes._workers if worker._process]
  processes.close()
  time.sleep(0.1)
  assert running
  assert all(process.poll() is not None for process in running)


def is_gone(pid):
  """Waits until a process is gone, or is dead and nobody has asked for its exit status."""
  stat = pathlib.Path(f'/proc/{pid}/stat')
  for _ in range(600):
    if not stat.exists() or stat.read_text().rpartition(')')[2].split()[0] == 'Z':
      return True
    time.sleep(0.05)
  return False


@pytest.mark.parametrize('how', ['hangs', 'ends', 'goes on'])
def test_what_a_reward_has_started_ends_with_it(processes, tmp_path, how):
  file = tmp_path / 'child'
  asked = Call(f'{PATH}.starts_a_process', None, [{'file': str(file)}, how])
  if how == 'goes on':
    assert processes.results([asked]) == [1.0]
    processes.close()
  else:
    with pytest.raises(UserError):
      processes.results([asked])
  assert is_gone(int(file.read_text()))


_RUN = """
from paxlite.finetuning.reinforcement.user_processes import Call, UserProcesses
processes = UserProcesses({count}, {seconds})
{act}
"""


def started(act, path, count=1, seconds=600.0):
  code = _RUN.format(count=count, seconds=seconds, act=act)
  environment = runs.environment() | {'PYTHONPATH': f'{path}:{runs.ROOT}'}
  return subprocess.Popen(
    [sys.executable, '-c', code], env=environment, stderr=subprocess.PIPE, text=True
  )


def test_a_run_that_is_killed_takes_rewards_and_their_processes_with_it(tmp_path):
  file = tmp_path / 'child'
  asked = f"Call('{PATH}.starts_a_process', None, [{{'file': {str(file)!r}}}, 'hangs'])"
  process = started(f'processes.results([{asked}])', tmp_path)
  while not file.exists():
    assert process.poll() is None, process.stderr.read()
    time.sleep(0.05)
  child = int(file.read_text())
  parent = int(pathlib.Path(f'/proc/{child}/stat').read_text().rpartition(')')[2].split()[1])
  os.kill(process.pid, signal.SIGKILL)
  process.communicate()
  assert is_gone(parent)
  assert is_gone(child)


@pytest.mark.parametrize(('calls', 'count'), [(1, 2), (3, 4)])
def test_a_module_that_is_missing_ends_the_imports_of_others(tmp_path, calls, count):
  """The first process fails at once, while others import for minutes."""
  (tmp_path / 'my_slow.py').write_text(
    'import pathlib, time\n'
    'try:\n'
    '  pathlib.Path(__file__).with_name("first").touch(exist_ok=False)\n'
    'except FileExistsError:\n'
    '  time.sleep(600)\n'
    'raise ImportError("it is not there")\n'
  )
  calls = ', '.join(f"Call('my_slow.reward_{i}', None, None)" for i in range(calls))
  process = started(f'processes.look_up([{calls}])', tmp_path, count)
  said = process.communicate(timeout=60)[1]
  assert said.splitlines()[-1].endswith(
    'UserError: my_slow.reward_0 raised ImportError: it is not there (my_slow.py:6)'
  )


def test_a_new_process_imports_in_the_time_of_the_first_one(processes, tmp_path, monkeypatch):
  """What takes longer to import than a call may take is imported again after a call has hung."""
  (tmp_path / 'my_slow_module.py').write_text(
    'import os, time\ntime.sleep(3)\ndef f(ends):\n  return os._exit(3) if ends else 1.0\n'
  )
  monkeypatch.chdir(tmp_path)
  processes.look_up([Call('my_slow_module.f', None, None)])
  for _ in range(2):
    with pytest.raises(UserError, match='ended its process'):
      processes.results([Call('my_slow_module.f', None, [True])])
  assert processes.results([Call('my_slow_module.f', None, [False])] * 2) == [1.0, 1.0]
