"""Rewards and environments that tests name by their paths."""

import os
import pathlib
import subprocess
import sys
import time


def length(record, answer):
  print('what a reward prints is no answer')
  return len(answer) + record.get('more', 0)


def raises(record, answer):
  raise ValueError(f'no reward for {answer}')


def hangs(record, answer):
  time.sleep(60)


def starts_a_process(record, answer):
  """Starts a process of its own, writes its number into a file, and then does as `answer` says."""
  child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])
  path = pathlib.Path(record['file'])
  path.with_suffix('.tmp').write_text(str(child.pid))
  path.with_suffix('.tmp').rename(path)
  if answer == 'ends':
    os._exit(3)
  if answer == 'hangs':
    time.sleep(600)
  return 1.0


def is_nan(record, answer):
  return float('nan')


def ends(record, answer):
  os._exit(3)


class Counting:
  """Asks twice for another answer."""

  def reply(self, record, messages):
    count = sum(m['role'] == 'assistant' for m in messages)
    return f'again {count}' if count < 3 else None

  def reward(self, record, messages):
    return float(len(messages))


def forks(record, answer):
  """Both processes return."""
  return 1.0 + (os.fork() == 0)


def is_large(record, answer):
  return 'x' * (10 << 20)
