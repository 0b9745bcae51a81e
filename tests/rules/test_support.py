"""Differences of configs, of which digests and texts are made, leave nothing out."""

import itertools

import pytest

from paxlite.config.templates import config, template
from paxlite.layers.feedforward import FeedForward, GatedFeedForward
from tests.support.config_changes import NOTHING, changes, together


def layer(**values):
  return template(FeedForward, model_dims=8, hidden_dims=16, **values)


VALUES = [
  None, 1, True, 1.0, [], [1], [1, 2], {'a': 1}, layer(), layer(activation='relu'),
  template(GatedFeedForward, model_dims=8, hidden_dims=16),
  config(FeedForward, model_dims=8, hidden_dims=16),
  [layer()], [layer()] * 2, [layer(), layer(activation='relu')], [None, layer()],
  [None, layer(activation='relu')], [None, layer(activation='relu'), None],
  {'w': 0.5, 'a': layer()}, {'a': layer(activation='relu')},
  {'w': 0.5, 'a': layer(activation='relu')},
]  # fmt: skip


@pytest.mark.parametrize('old', [NOTHING, *VALUES], ids=itertools.count())
def test_other_configs_have_other_lines(old):
  texts = ['\n'.join(changes('x', old, new)) for new in VALUES]
  texts += ['\n'.join(together(changes('x', old, new))) for new in VALUES]
  each = len(VALUES)
  for found in (texts[:each], texts[each:]):
    assert len({*found}) == each
    assert [value for value, text in zip(VALUES, found, strict=True) if not text] == [
      value for value in VALUES if value is old
    ]


def test_places_with_the_same_change_are_one_line():
  lines = ['task.a.b = 1', 'task.a.c.b = 1', 'task.a.c: x.Y', 'task.b.d = (1, 2)']
  assert list(together(lines)) == ['task.{a, a.c}.b = 1', 'task.a.c: x.Y', 'task.b.d = (1, 2)']
