"""UPPER_CASE attributes: inheritance, overrides, parsing and messages."""

from typing import Literal

import fiddle as fdl
import jax.numpy as jnp
import pytest

from paxlite.errors import UserError
from paxlite.experiment import Experiment
from paxlite.experiments.gpt import GPT126M
from paxlite.params import Parameters, convert, parse


class Base(Parameters):
  LAYERS = 12
  RATE: float = 1e-3
  NAME: str = 'base'
  MESH: list[int] = [1, 1, 1]
  FILES: list[str] = []
  FLAG = False
  OPTIONAL: int | None = None
  KIND: Literal['a', 'b'] = 'a'
  LR_COS_MIN_RATIO = 0.1
  WARMUP = 10

  @property
  def DECAY_START(self) -> int:
    return self.WARMUP + 1


class Mixin(Base):
  NAME = 'mixin'


class Child(Mixin, Base):
  LAYERS = 24


def test_mixins_and_overrides():
  assert (Child().LAYERS, Child().NAME, Child(LAYERS=2).LAYERS) == (24, 'mixin', 2)
  assert Base().LAYERS == 12


def test_derived_values_follow_overrides_and_can_be_set():
  assert Child().DECAY_START == 11
  assert Child(WARMUP=99).DECAY_START == 100
  assert Child(WARMUP=99, DECAY_START=5).DECAY_START == 5
  assert GPT126M(LR_COS_WARMUP=10).LR_COS_DECAY_START == 11


def test_a_misspelt_attribute_is_an_error_at_class_creation():
  with pytest.raises(TypeError, match=r'R_COS_MIN_RATIO looks like a misspelling of .* LR_COS_MIN'):

    class _(Base):
      R_COS_MIN_RATIO = 0.2


def test_an_annotated_near_name_is_a_new_parameter():
  class New(Base):
    R_COS_MIN_RATIO: float = 0.2

  assert New(R_COS_MIN_RATIO=0.3).R_COS_MIN_RATIO == 0.3


@pytest.mark.parametrize(
  ('name', 'text', 'value'),
  [
    ('LAYERS', '3', 3),
    ('LAYERS', '1e3', 1000),
    ('LAYERS', '1_000', 1000),
    ('RATE', '3', 3.0),
    ('RATE', '1e-4', 1e-4),
    ('NAME', 'bfloat16', 'bfloat16'),
    ('NAME', '"bfloat16"', 'bfloat16'),
    ('NAME', '123', '123'),
    ('NAME', 'a/b=c', 'a/b=c'),
    ('MESH', '[8,1,1]', [8, 1, 1]),
    ('MESH', '"[8, 1, 1]"', [8, 1, 1]),
    ('MESH', '(8, 1, 1)', [8, 1, 1]),
    ('FILES', 'a.jsonl', ['a.jsonl']),
    ('FILES', 'a.jsonl,b c.jsonl', ['a.jsonl', 'b c.jsonl']),
    (
      'FILES',
      'data/*.jsonl, tfds:c4/en:3.0.1/train[:9%]',
      [
        'data/*.jsonl',
        'tfds:c4/en:3.0.1/train[:9%]',
      ],
    ),
    ('FILES', 'x_layers_.{1,2}/w,emb', ['x_layers_.{1,2}/w', 'emb']),
    ('FILES', "['a.jsonl', 'b.jsonl']", ['a.jsonl', 'b.jsonl']),
    ('FILES', '"[\'a.jsonl\']"', ['a.jsonl']),
    ('FILES', '[a.jsonl,b.jsonl]', ['a.jsonl', 'b.jsonl']),
    ('FILES', "'a.jsonl','b.jsonl'", ['a.jsonl', 'b.jsonl']),
    ('FILES', '[]', []),
    ('FLAG', 'True', True),
    ('FLAG', 'false', False),
    ('FLAG', '1', True),
    ('OPTIONAL', 'None', None),
    ('OPTIONAL', '5', 5),
    ('KIND', 'b', 'b'),
    ('KIND', "'b'", 'b'),
  ],
)
def test_parse(name, text, value):
  parsed = parse(Base, name, text)
  assert parsed == value
  assert type(parsed) is type(value)


@pytest.mark.parametrize(
  ('name', 'text', 'message'),
  [
    ('LAYERS', 'many', r"Base.LAYERS must be int, for example 12; got 'many'"),
    ('LAYERS', '1.5', 'must be int'),
    ('LAYERS', 'True', 'must be int'),
    ('FLAG', 'maybe', 'must be bool'),
    ('MESH', '[8,1', 'must be list'),
    ('MESH', '[8,1.5,1]', 'must be list'),
    ('MESH', 'a,b', 'must be list'),
    ('FILES', "['a.jsonl'", 'must be list'),
    ('FILES', 'a.jsonl,', 'must be list'),
    ('FILES', '', 'must be list'),
    ('FILES', 'None', 'must be list'),
    ('KIND', 'c', "must be one of 'a', 'b'"),
    ('OPTIONAL', 'x,', 'must be int or None'),
    ('OPTIONAL', 'x', 'must be int or None'),
    ('LAYER', '3', 'Base has no attribute LAYER. Did you mean LAYERS'),
    ('zzz', '3', 'no attribute zzz. See python -m paxlite.tools.experiments'),
  ],
)
def test_parse_errors_say_what_is_expected(name, text, message):
  with pytest.raises(UserError, match=message):
    parse(Base, name, text)


def test_objects_are_checked_too():
  assert convert(GPT126M, 'FPROP_DTYPE', jnp.float32) == 'float32'
  assert GPT126M(FPROP_DTYPE=jnp.bfloat16).FPROP_DTYPE == 'bfloat16'
  with pytest.raises(UserError, match='NUM_LAYERS must be int'):
    GPT126M(NUM_LAYERS='12')
  with pytest.raises(UserError, match='no attribute NUM_LAYER'):
    GPT126M(NUM_LAYER=12)


def test_config_holds_every_value_and_builds_to_the_same():
  cfg = GPT126M.config()
  derived = {'HIDDEN_DIMS', 'USE_FFN_BIAS', 'DIMS_PER_HEAD', 'NUM_KV_HEADS', 'SOFTMAX_INIT_STD'}
  derived |= {'LR_COS_DECAY_START', 'LR_LRED_DECAY_START'}
  derived |= {'NORM_SCALE_OFFSET', 'TRAINABLE_VARIABLES', 'USE_TE', 'TE_RECIPE'}
  assert set(cfg.__arguments__) == set(GPT126M().values()) - derived
  cfg.NUM_LAYERS = 3
  built = fdl.build(cfg)
  assert isinstance(built, Experiment)
  assert built.values() == {**GPT126M().values(), 'NUM_LAYERS': 3}


def test_lists_of_a_class_are_not_shared_with_its_configs():
  cfg = GPT126M.config()
  cfg.ICI_MESH_SHAPE[0] = 99
  assert GPT126M.ICI_MESH_SHAPE == [8, 1, 1]
  assert GPT126M.config().ICI_MESH_SHAPE == [8, 1, 1]
