"""Former names of attributes do what the names of today do, wherever they are written."""

import json
import random

import pytest

from paxlite.config import former_names
from paxlite.config.attributes import attribute_types
from paxlite.config.experiment_file import EXPERIMENT, read_experiment
from paxlite.config.templates import config_text
from paxlite.core.errors import UserError
from paxlite.experiments.base import Experiment, full_name
from paxlite.experiments.deepseek_v4 import DeepSeekV4_Flash
from paxlite.experiments.demo import TinyGPT
from paxlite.experiments.gemma4 import Gemma4E2B
from paxlite.experiments.granite import GraniteHybrid
from paxlite.experiments.identity import (
  fingerprint,
  identity_of,
  refuse_other_experiment,
  stated_values,
)
from paxlite.experiments.llama import SmolLM135M
from paxlite.experiments.llama4 import Llama4Scout
from paxlite.experiments.parts.attention_temperature import AttentionTemperature
from paxlite.experiments.registry import class_of
from paxlite.finetuning.preferences.attributes import Preferences
from paxlite.programs.launch import build_experiment


class Mamba(GraniteHybrid):
  ATTENTION_PATTERN = ['mamba2']


class Preferring(Preferences, TinyGPT):
  CHECKPOINT_RESTORE_PATH = '/weights'


CLASSES = TinyGPT, Llama4Scout, Gemma4E2B, DeepSeekV4_Flash, Mamba, Preferring


def drawn(default: object, rng: random.Random) -> object:
  if isinstance(default, bool):
    return not default
  if isinstance(default, float):
    return round(rng.uniform(0.1, 2), 3)
  assert default is None or isinstance(default, int)
  return (default or 0) + rng.randrange(1, 4)


@pytest.mark.cases(fast=10)
@pytest.mark.parametrize('seed', range(3))
@pytest.mark.parametrize('former', former_names.FORMER)
def test_a_former_name_is_that_of_the_same_attribute(former, seed, tmp_path, caplog):
  """On a command line, in Python, in a class, and in the file of a run, where nobody wrote it."""
  former_names._say.cache_clear()
  now = former_names.FORMER[former]
  cls: type[Experiment] = next(c for c in CLASSES if now in attribute_types(c))
  value = drawn(getattr(cls(), now), random.Random(f'{former} {seed}'))
  expected = cls(**{now: value})
  path = tmp_path / EXPERIMENT
  text = json.dumps(identity_of(expected)).replace(f'"{now}"', f'"{former}"')
  path.write_text(text.replace('"values": {', '"values": {"EVAL_RUN_CODE": false, '))
  stored = read_experiment(path)
  assert stored['values'].keys() == expected.values().keys(), 'without what is gone'
  refuse_other_experiment(expected, tmp_path)
  assert not caplog.records
  stated = type('Mine', (cls,), {former: value, '__module__': __name__})
  assert former not in vars(stated)
  found = [
    class_of(stored)(**stated_values(cls, stored['values'])),
    build_experiment(full_name(cls), [], {former: str(value)}), cls(**{former: value}), stated(),
  ]  # fmt: skip
  assert [r.getMessage() for r in caplog.records] == [f'the attribute {former} is now called {now}']
  for e in found:
    assert getattr(e, now) == getattr(e, former) == value
    assert e.values() == expected.values()
    assert config_text(e.build_task()) == config_text(expected.build_task())


def test_a_former_name_in_a_plain_mixin_and_where_it_is_read():
  class Segments:
    MAX_TEXTS_PER_ROW = 8

  class Mine(Segments, TinyGPT):
    pass

  class Others(Segments, TinyGPT):
    MAX_SEGMENTS_PER_SEQ = 4

  assert Mine().MAX_SEGMENTS_PER_SEQ == Mine.MAX_SEGMENTS_PER_SEQ == Mine.MAX_TEXTS_PER_ROW == 8
  assert Others().MAX_SEGMENTS_PER_SEQ == 4
  assert TinyGPT.MAX_TEXTS_PER_ROW is None
  assert TinyGPT(MAX_SEGMENTS_PER_SEQ=0).MAX_TEXTS_PER_ROW == 0
  assert Segments.MAX_TEXTS_PER_ROW == 8
  with pytest.raises(UserError, match='must be int'):
    TinyGPT(MAX_TEXTS_PER_ROW='many')


def test_a_former_name_of_an_optional_part():
  expected = SmolLM135M(ATTENTION_TEMPERATURE_SCALE=0.1)
  for e in (
    SmolLM135M(QUERY_GROWTH=0.1),
    build_experiment('SmolLM135M', [], {'QUERY_GROWTH': '0.1'}),
    SmolLM135M(QUERY_GROWTH=0.1).replaced(NUM_LAYERS=30),
  ):
    assert type(e) is type(expected)
    assert e.values() == expected.values()
  assert type(SmolLM135M(QUERY_GROWTH=0.0)) is SmolLM135M
  with pytest.raises(UserError, match=r'write class Mine\(AttentionTemperature, …\)'):
    type('Mine', (SmolLM135M,), {'QUERY_GROWTH': 0.1, '__module__': __name__})


@pytest.mark.parametrize('former', sorted(former_names.FINGERPRINTED.values()))
def test_a_former_name_of_an_attribute_that_a_class_lacks_is_refused(former):
  if hasattr(TinyGPT, former_names.FORMER[former]):
    return
  for values in ({former: 3}, {'__annotations__': {former: int}, former: 3}):
    with pytest.raises(UserError, match=rf'{former}|{former_names.FORMER[former]}'):
      type('Mine', (TinyGPT,), {'__module__': 'mine', **values})


def of_former_names(cfg):
  cfg.ROPE_FAST_TURNS = 16.0


def test_a_fiddler_learns_the_name_of_today():
  fiddler = f'{__name__}.of_former_names'
  with pytest.raises(UserError, match='ROPE_FAST_TURNS is now called ROPE_BETA_FAST'):
    build_experiment('SmolLM135M', [fiddler], {})


def test_local_states_know_an_experiment_by_its_former_names():
  """The checksum of a release before the attributes had today's names."""
  assert fingerprint(TinyGPT()) == 2173330096


@pytest.mark.parametrize('former', ['QUERY_GROWTH', 'ROPE_FAST_TURNS'])
def test_a_former_name_is_set_on_a_class_and_on_an_object(former):
  now = former_names.FORMER[former]
  cls = type('Mine', (AttentionTemperature, TinyGPT), {'__module__': 'mine', former: 0.25})
  setattr(cls, former, 0.5)
  made = cls()
  assert (getattr(made, now), getattr(made, former), getattr(cls, former)) == (0.5, 0.5, 0.5)
  setattr(made, former, 0.75)
  assert getattr(made, now) == getattr(made, former) == 0.75


def test_both_names_at_once_are_refused():
  message = 'ROPE_FAST_TURNS and ROPE_BETA_FAST are one attribute: leave ROPE_FAST_TURNS out'
  both = {'ROPE_FAST_TURNS': 16.0, 'ROPE_BETA_FAST': 8.0}
  with pytest.raises(UserError, match=message):
    type('Mine', (TinyGPT,), {'__module__': 'mine', **both})
  with pytest.raises(UserError, match=message):
    build_experiment('TinyGPT', [], {name: str(value) for name, value in both.items()})
