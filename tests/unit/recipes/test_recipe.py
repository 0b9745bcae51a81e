"""Recipes: names, references between stages, values of a command line, and conditions."""

import random

import pytest

from paxlite.core.errors import UserError
from paxlite.recipes import Files, Recipe, Stage
from paxlite.recipes.recipe import Condition, Stated, placed, text_of


def made(folder, count=1, share=0.5, words=()):
  """Makes nothing: recipes are not run here."""


DATA = Files('data', made, {'count': 1, 'share': 0.5, 'words': ['a']})
BASE = Stage('base', 'TinyGPT', {'TRAIN_FILES': ['{data}/a.txt']})


@pytest.mark.parametrize(
  ('stages', 'said'),
  [
    ([], 'the recipe has no stages'),
    ([Stage('Base', 'TinyGPT')], "'Base' is not a name for a stage"),
    ([Stage('a/b', 'TinyGPT')], 'is not a name for a stage'),
    ([BASE], 'stage base: no stage data comes before it'),
    ([DATA, DATA], 'two stages are called data'),
    ([DATA, BASE, Stage('sft', 'TinyGPT', starts_from='bsae')], 'Did you mean base?'),
    ([DATA, Stage('sft', 'TinyGPT', starts_from='data')], 'which trains no weights'),
    ([Stage('sft', 'TinyGPT', starts_from='sft')], 'no stage sft comes before it'),
    ([DATA, Stage('a', 'TinyGPT', {'X': '{data}'}), Files('b', ['x', '{c}'])], 'no stage c comes'),
    ([Stage('a', 'TinyGPT', holds='exact_match >= 1')], 'is not written as'),
    ([Stage('a', 'TinyGPT', holds='sums: exact_match >= x')], 'is not written as'),
    (
      [DATA, BASE, Stage('c', 'TinyGPT', {'CHECKPOINT_RESTORE_PATH': 'w'}, 'base')],
      'starts_from or CHECKPOINT_RESTORE_PATH, not both',
    ),
  ],
)
def test_a_recipe_that_cannot_be_is_refused_in_a_line(stages, said):
  with pytest.raises(UserError, match='(?s)' + said) as e:
    Recipe(stages)
  assert '\n' not in str(e.value)


def test_a_stage_needs_those_that_it_names():
  recipe = Recipe([DATA, BASE, Stage('sft', 'TinyGPT', {'A': ['x', '{data}/{{ y }}']}, 'base')])
  assert [recipe.needs(name) for name in recipe.stages] == [[], ['data'], ['base', 'data']]


@pytest.mark.parametrize(
  ('setting', 'said'),
  [
    ('base', 'is not written as'),
    ('base.X', 'is not written as'),
    ('bas.X=1', 'Did you mean base'),
    ('data.cuont=1', 'Did you mean count'),
    ('data.count=1.5', 'must be of the type int'),
    ('data.words=a', 'must be of the type list'),
  ],
)
def test_a_setting_that_cannot_be_is_refused(setting, said):
  with pytest.raises(UserError, match=said):
    Recipe([DATA, BASE]).changed([setting])


def test_settings_change_values_of_their_stage_alone():
  recipe = Recipe([DATA, BASE]).changed(['data.count=7', 'data.share=1', 'base.LEARNING_RATE=1e-5'])
  assert recipe.stages['data'].values == {'count': 7, 'share': 1.0, 'words': ['a']}
  assert recipe.stages['base'].texts == {
    'TRAIN_FILES': "['{data}/a.txt']", 'LEARNING_RATE': '1e-5',
  }  # fmt: skip


def test_a_text_of_a_value_is_read_as_the_value():
  """Drawn values, as attributes of the types of these read their texts."""
  from paxlite.config.attributes import read

  draw = random.Random(5)
  letters = 'abc {}\'"\\/.,=[]{{%\n'
  word = lambda: ''.join(draw.choices(letters, k=draw.randint(1, 12))).strip() or 'x'
  for _ in range(300):
    value, kind = draw.choice(
      [
        (draw.randint(-9, 9), int), (draw.uniform(-1, 1), float), (draw.random() < 0.5, bool),
        (None, int | None), ([word() for _ in range(draw.randint(1, 3))], list[str]), (word(), str),
      ]
    )  # fmt: skip
    assert read(text_of(value), kind) == value
  assert text_of(Stated('[8, 1]')) == '[8, 1]'


def test_folders_of_stages_are_placed_in_texts_alone():
  folders = {'data': '/r/data'}
  assert placed(['{data}/a', 3, '{{ data }} {% x %}'], folders) == [
    '/r/data/a', 3, '{{ data }} {% x %}',
  ]  # fmt: skip
  assert isinstance(placed(Stated('{data}'), folders), Stated)


def test_a_condition_compares():
  draw = random.Random(6)
  for _ in range(200):
    bound, value = draw.randint(-3, 3), draw.randint(-3, 3)
    sign = draw.choice(['>=', '<=', '>', '<'])
    condition = Condition.parsed(f'some sums: exact_match {sign} {bound}')
    assert condition == Condition('some sums', 'exact_match', sign, bound)
    assert condition.is_met(value) == eval(f'{value} {sign} {bound}')
