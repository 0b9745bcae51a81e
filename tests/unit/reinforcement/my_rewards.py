"""Rewards and environments that tests name by their paths."""

import os
import time


def length(record, answer):
  print('what a reward prints is no answer')
  return len(answer) + record.get('more', 0)


def raises(record, answer):
  raise ValueError(f'no reward for {answer}')


def hangs(record, answer):
  time.sleep(60)


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
