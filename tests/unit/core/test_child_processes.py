"""Processes that end with the one that started them."""

import signal
import subprocess
import sys

import pytest

from tests.support import runs

_PARENT = """
import os, subprocess, sys, time
from paxlite.core.child_processes import terminated_with_parent
child = '''
import signal, sys, time
from paxlite.core.child_processes import obey_parent
def leave(*_):
  print('saved', flush=True)
  sys.exit(75)
signal.signal(signal.SIGTERM, leave)
obey_parent()
print('ready', flush=True)
time.sleep(600)
'''
subprocess.Popen([sys.executable, '-c', child], env=os.environ | terminated_with_parent())
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != 'linux', reason='needs prctl of Linux')
@pytest.mark.parametrize('number', [signal.SIGKILL, signal.SIGSEGV])
def test_a_run_saves_when_the_process_that_started_it_is_killed(number):
  """As a run of `paxlite ladder`, which may be killed in any way."""
  parent = subprocess.Popen(
    [sys.executable, '-c', _PARENT], env=runs.environment() | {'PYTHONPATH': str(runs.ROOT)},
    stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
  )  # fmt: skip
  assert parent.stdout.readline() == 'ready\n'
  parent.send_signal(number)
  assert parent.stdout.readline() == 'saved\n'  # by the child, which has the same pipe
  assert parent.stdout.read() == ''
  assert parent.wait() == -number
