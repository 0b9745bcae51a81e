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


def add(a: int, b: int = 0) -> int:
  """Adds numbers.

  Args:
    a: The first one.
    b: The other one,
      which may be missing.

  Returns:
    Their sum.
  """
  print('what a tool prints is no answer')
  if a > 99:
    raise ValueError('too large')
  if a < 0:
    os._exit(3)
  return a + b


class Faulty:
  """Does what the record says, in `reply` or in `reward`."""

  def _act(self, fault):
    if fault == 'raises':
      raise RuntimeError('first line\nsecond line')
    if fault == 'hangs':
      time.sleep(60)
    if fault == 'ends':
      os._exit(3)
    if fault == 'forks':
      os.fork()
    if fault == 'prints':
      print('x' * (1 << 20))
    return {
      'is large': 'x' * (10 << 20), 'is NaN': float('nan'), 'is a text': '1.0', 'is None': None,
      'is infinite': 1e39, 'another count': [1.0, 2.0, 3.0], 'NaN of a turn': [float('nan')],
      'no message': [{'role': 'user'}], 'no role': {'role': 'poet', 'content': ''},
      'a number': 4,
    }.get(fault, 1.0)  # fmt: skip

  def reply(self, record, messages):
    found = self._act(record.get('reply'))
    return 'on' if found == 1.0 else found

  def reward(self, record, messages):
    return self._act(record.get('reward'))


class OfTurns:
  """Gives each answer its number."""

  def reply(self, record, messages):
    return None

  def reward(self, record, messages):
    return [i + 1 for i in range(sum(m['role'] == 'assistant' for m in messages))]


class Pairs:
  """Replies with two messages, rewards each answer, and fails where a prompt is c or d."""

  def reply(self, record, messages):
    return [{'role': 'tool', 'content': 'ab'}, {'role': 'user', 'content': 'c'}]

  def reward(self, record, messages):
    if record['messages'][0]['content'] in 'cd':
      raise ValueError('no reward')
    return [0.5 * len(m['content']) for m in messages if m['role'] == 'assistant']


async def waits(a: int) -> int:
  return a


def unnamed(a: int, /) -> int:
  return a
