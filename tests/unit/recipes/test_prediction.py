"""Hours and cost on a machine: what is refused, and what is written."""

import types

import pytest

from paxlite.core.errors import UserError
from paxlite.recipes import command, experiments, prediction


@pytest.mark.parametrize(
  ('words', 'said'),
  [
    (['--target=h100x8'], 'is for --dry_run'),
    (['--dry_run', '--price=2.5'], 'is for --target'),
    (['--dry_run', '--target=h100x8', '--price=cheap'], 'must be dollars of an hour'),
    (['--dry_run', '--target=h100x8', '--price=-1'], 'must be dollars of an hour'),
    (['--dry_run', '--target=h100x8', '--price=nan'], 'must be dollars of an hour'),
  ],
)
def test_what_cannot_be_is_refused_in_a_line(words, said):
  with pytest.raises(UserError, match=said) as e:
    command.main(['chat_small', *words])
  assert '\n' not in str(e.value)


def test_hours_cost_those_of_all_devices():
  target = types.SimpleNamespace(devices=8)
  assert prediction.cells(1.5, target, 2.5) == ['1.5', '30.00']
  assert prediction.cells(1.5, target, None) == ['1.5', '']
  assert prediction.cells(None, target, 2.5) == ['?', '?']


@pytest.mark.parametrize(
  ('hours', 'total'),
  [({'a': 1.5, 'b': 2.0}, ['3.5', '70.00']), ({'a': 1.5, 'b': None}, ['?', '?'])],
)
def test_a_sum_is_known_if_all_stages_are(hours, total, monkeypatch):
  monkeypatch.setattr(prediction, 'hours_of', lambda e, target, stage: hours[stage])
  target = types.SimpleNamespace(devices=8, name='h100x8')
  table = [['stage', ''], ['files', ''], ['a', 'done'], ['b', '']]
  found = command._with_hours(table, dict.fromkeys(hours), target, 2.5)
  assert found[0] == ['stage', 'hours', 'dollars', '']
  assert [row[1:3] for row in found[1:3]] == [['', ''], ['1.5', '30.00']]
  assert found[-1][1:3] == total


@pytest.mark.parametrize('name', ['chat_d20', 'chat_small'])
def test_bundled_recipes_are_built_without_the_hub(name, monkeypatch, tmp_path):
  """Nothing is asked for, and nothing copied, before a stage runs."""
  monkeypatch.setenv('HF_ENDPOINT', 'http://127.0.0.1:9')
  monkeypatch.setattr('paxlite.hub.datasets.listing_of', lambda name: pytest.fail(str(name)))
  recipe = command.recipe_in(command.module_of(name))
  built = experiments.built(recipe, tmp_path / 'all')
  assert [*built] == ['pretrain', 'sft', 'grpo']
