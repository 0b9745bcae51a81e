"""`paxlite families`, and the tables of the site that it makes."""

import random
import re

import pytest

from paxlite.core.errors import UserError
from paxlite.weights.commands import families
from paxlite.weights.family_tables import FAMILIES, OTHER_TYPES


def printed(capsys, *words: str) -> str:
  families.main(list(words))
  return capsys.readouterr().out


def test_every_family_is_listed_once(capsys):
  firsts = [x.partition(':')[0] for x in printed(capsys).splitlines() if not x.startswith(' ')]
  assert sorted(', '.join(firsts).split(', ')) == sorted([*FAMILIES, *OTHER_TYPES])
  for row in families.rows():
    assert not row.special.startswith('python -m'), row
    assert row.special.endswith('.'), row


def test_a_family_and_the_families_of_a_key():
  rows = {name: row for row in families.rows() for name in row.keys}
  for name in random.Random(0).sample(sorted(FAMILIES), 5):
    theirs = {key for entry in FAMILIES[name].keys for key in entry.theirs}
    assert {*rows[name].keys[name]} == theirs


def test_words(capsys):
  rng = random.Random(1)
  for row in rng.sample([r for r in families.rows() if len(r.keys) == 1], 5):
    found = printed(capsys, row.types[0])
    assert found.startswith(f'{", ".join(row.types)}: ')
    assert all(name in found for name in row.experiments)
    key = rng.choice(row.keys[row.types[0]])
    assert key in re.findall(r'\w+', found)
    assert row.types[0] in printed(capsys, key)
  with pytest.raises(UserError, match="no family has or reads 'nothing of it'"):
    families.main(['nothing of it'])


def test_tables():
  assert families.table().count('\n') == len(families.rows()) + 1
  cells = [line.split(' | ') for line in families.keys_table().splitlines()[2:]]
  readers = {key: where for keys, where in cells for key in re.findall(r'`(\w+)`', keys)}
  for name, family in FAMILIES.items():
    for key in (key for entry in family.keys for key in entry.theirs):
      assert readers[key] == 'all |' or name in re.findall(r'\w+', readers[key])
