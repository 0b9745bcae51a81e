"""Rewards and environments that tests name by their paths."""

import decimal
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np


def length(record, answer):
  print('what a reward prints is no answer')
  return len(answer) + record.get('more', 0)


def share_of_a(record, answer):
  return answer.count('a') / max(len(answer), 1)


def begins_with_a(record, answer):
  return float(answer.startswith('a'))


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
      'a number': 4, 'half of a pair': '\ud800',
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


class _Silent(Exception):
  def __str__(self):
    raise RuntimeError('no text')


def _nested():
  found = []
  for _ in range(500):
    found = [found]
  return found


async def _later():
  return 1.0


def _raise(error):
  raise error


def _ignores_exceptions():
  while True:
    try:
      time.sleep(60)
    except BaseException:
      continue


def _alarmed():
  """Bounds itself by a signal, which only the main thread of a process may do."""

  def stop(*_):
    raise TimeoutError('too long')

  signal.signal(signal.SIGALRM, stop)
  signal.setitimer(signal.ITIMER_REAL, 0.05)
  try:
    time.sleep(60)
  except TimeoutError:
    return 0.25
  return 1.0


# what a reward does, and what is said of it: a number, or a part of the message
ODD = {
  'a number': (lambda: 1, 1.0),
  'a truth': (lambda: True, 1.0),
  'of numpy': (lambda: np.float32(0.5), 0.5),
  'an array of one': (lambda: np.array(0.5), 0.5),
  'a decimal': (lambda: decimal.Decimal('0.5'), 0.5),
  'prints 10 MB': (lambda: print('x' * (10 << 20), file=sys.stderr) or 1.0, 1.0),
  'writes where answers go': (lambda: os.write(1, b'{"result": 7}\n') and 1.0, 1.0),
  'bounds itself': (_alarmed, 0.25),
  'a child reads': (lambda: float(len(subprocess.run(['cat'], stdout=-1).stdout)), 0.0),
  'reads': (input, 'raised EOFError'),
  'none': (lambda: None, 'returned None .*must be a finite number'),
  'NaN': (lambda: float('nan'), 'returned nan '),
  'infinite': (lambda: np.inf, 'returned inf '),
  'larger than float32': (lambda: 10**400, 'must be a finite number'),
  'of 5,000 digits': (lambda: 10**5000, 'raised ValueError'),
  'a text': (lambda: '1.0', "returned '1.0' "),
  'a list': (lambda: [1.0], r'returned \[1.0\] '),
  'an array of two': (lambda: np.ones(2), 'raised TypeError'),
  'a mapping': (lambda: {'score': 1.0}, "returned {'score': 1.0} "),
  'nested': (_nested, r'returned \[+'),
  'a coroutine': (_later, 'raised TypeError'),
  'half of a pair': (lambda: '\ud800', 'must be a finite number'),
  '10 MB': (lambda: 'x' * (10 << 20), 'returned more than 4 MiB'),
  'raises lines': (lambda: _raise(ValueError('a\nb' * 9999)), 'raised ValueError: a ba ba'),
  'raises without a text': (lambda: _raise(_Silent()), 'raised _Silent: '),
  'exits': (lambda: sys.exit(3), 'raised SystemExit: 3'),
  'interrupts': (lambda: _raise(KeyboardInterrupt()), 'ended its process'),
  'kills itself': (lambda: os.kill(os.getpid(), signal.SIGKILL), 'with the exit status -9'),
  'closes files': (lambda: os.closerange(3, 256) or 1.0, 'ended its process'),
  'hangs': (lambda: time.sleep(60), r'did not finish within 2 seconds \(REWARD_TIMEOUT\)'),
  'ignores exceptions': (_ignores_exceptions, 'did not finish within 2 seconds'),
}


def odd(record, answer):
  return ODD[answer][0]()
