"""Alarms of losses that are 0 or constant, and of steps without a learned token."""

import itertools
import random
import types

import pytest

from paxlite.losses.metrics import Weighted
from paxlite.training.loss_alarm import LossAlarm

STEPS = 10


def said(steps) -> list[str]:
  """Returns the lines of a run of these steps, pairs of a loss and a weight."""
  lines: list[str] = []
  loop = types.SimpleNamespace(summaries=types.SimpleNamespace(say=lines.append))
  alarm = LossAlarm()
  alarm.on_start(None, 0, loop)
  for number, pair in enumerate([*steps, (9.0, 1.0)], 1):  # a step is looked at in the next one
    alarm.after_step(None, number, {'Metrics/total_loss': Weighted(*pair)}, loop)
  return lines


def expected(steps) -> list[tuple[int, str]]:
  """Returns the last step and the kind of each alarm, by groups of equal steps."""
  found = []
  number = 0
  kind_of = lambda step: (step[0] if step[1] else None, step[1] > 0)
  for (loss, weight), same in itertools.groupby(steps, kind_of):
    count = len([*same])
    if not weight:
      kind, needed = 'no token', STEPS
    else:
      kind, needed = ('exactly 0', STEPS) if loss == 0 else ('exactly', STEPS + 1)
    if count >= needed:
      found.append((number + needed, kind))
    number += count
  return found


@pytest.mark.parametrize('seed', range(5))
def test_drawn_losses(seed):
  draw = random.Random(seed)
  kinds = [(0.0, 1.0), (2.5, 4.0), (1.0, 4.0), (0.0, 0.0)]
  steps = [s for _ in range(12) for s in [draw.choice(kinds)] * draw.choice([1, 3, 9, 10, 11, 25])]
  lines, wanted = said(steps), expected(steps)
  assert wanted, 'a draw without an alarm shows nothing'
  assert len(lines) == len(wanted)
  for line, (last, kind) in zip(lines, wanted, strict=True):
    assert f'to {last:,} ' in line
    assert kind in line


def test_a_loss_that_falls_says_nothing():
  assert said([(3 - i / 100, 8.0) for i in range(200)]) == []
