"""The folder of a recipe: what in it is refused, and what is left where stages run again."""

import json
import random

import pytest

from paxlite.core.errors import UserError
from paxlite.recipes import Files, Recipe
from paxlite.recipes.recipe_folder import RecipeFolder


def write(folder, count):
  (folder / 'a.txt').write_text('x' * count)


def recipe(*counts: int) -> Recipe:
  """Returns stages of files, each of which needs the one before it."""
  names = 'abcdefgh'[: len(counts)]
  before = [{}, *({'source': f'{{{name}}}/a.txt'} for name in names)]
  return Recipe(
    [Files(n, write, {'count': c, **b}) for n, c, b in zip(names, counts, before, strict=False)]
  )


def run(place: RecipeFolder, stages: Recipe) -> dict[str, str]:
  """Makes what is to be made; returns the states before."""
  statuses = place.statuses([*stages.stages], {})
  place.folder.mkdir(exist_ok=True)
  place.begin(statuses)
  for name, status in statuses.items():
    if status.state != 'done':
      place.starts(name, status.made_of)
      (place.folder / name).mkdir()
      write(place.folder / name, stages.stages[name].values['count'])
      place.ends(name)
  return {name: str(status) for name, status in statuses.items()}


@pytest.mark.parametrize('seed', range(8))
def test_drawn_changes_run_the_first_changed_stage_and_all_after_it(seed, tmp_path):
  draw, folder = random.Random(seed), tmp_path / 'all'
  counts = [draw.randint(1, 9) for _ in range(draw.randint(2, 6))]
  assert set(run(RecipeFolder(recipe(*counts), 'm', folder), recipe(*counts)).values()) == {'runs'}
  for n in range(3):
    first = draw.randrange(len(counts))
    counts[first] += 1
    found = [*run(RecipeFolder(recipe(*counts), 'm', folder), recipe(*counts)).values()]
    assert found[:first] == ['done'] * first
    assert found[first] == f'runs again: count {counts[first] - 1} → {counts[first]}'
    assert all(state.startswith('runs again: it needs ') for state in found[first + 1 :])
    last = 'abcdefgh'[len(counts) - 1]
    assert len([*folder.glob(f'{last}.before*')]) == n + 1  # nothing is deleted


@pytest.mark.parametrize(
  ('content', 'said'),
  [
    ('{', 'is damaged'),
    ('[]', 'is damaged'),
    (json.dumps({'recipe': 'm'}), 'is damaged'),
    (json.dumps({'recipe': 'm', 'stages': {'a': {'outcome': None}}}), 'is damaged'),
    (json.dumps({'recipe': 'n', 'stages': {}}), 'belongs to the recipe n, not m'),
    (None, 'holds something other than a recipe'),
  ],
)
def test_a_folder_of_something_else_is_refused(content, said, tmp_path):
  (tmp_path / 'notes.txt').touch()
  if content is not None:
    (tmp_path / 'recipe.json').write_text(content)
  with pytest.raises(UserError, match=said):
    RecipeFolder(recipe(1), 'm', tmp_path)


def test_a_folder_in_the_place_of_a_stage_is_not_touched(tmp_path):
  place = RecipeFolder(recipe(1), 'm', tmp_path / 'all')
  (tmp_path / 'all' / 'a').mkdir(parents=True)
  (tmp_path / 'all' / 'recipe.json').write_text(json.dumps({'recipe': 'm', 'stages': {}}))
  with pytest.raises(UserError, match='is not of this recipe'):
    place.statuses(['a'], {})
