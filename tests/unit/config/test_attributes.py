"""UPPER_CASE attributes: inheritance, overrides, parsing and messages."""

import functools
import shlex
from typing import Literal

import fiddle as fdl
import jax.numpy as jnp
import pytest

from paxlite.config.attributes import Attributes, attribute_types, convert, parse
from paxlite.contrib.gpu.scripts_gpu.configs import FlatTokens5B
from paxlite.core import shell
from paxlite.core.errors import UserError
from paxlite.experiments.base import Experiment
from paxlite.experiments.demo import DemoGPT, TinyGPT
from paxlite.experiments.gpt import GPT126M


class Base(Attributes):
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
  with pytest.raises(UserError, match=r'no attribute R_COS_MIN_RATIO. Did you mean LR_COS_MIN_RAT'):

    class _(Base):
      R_COS_MIN_RATIO = 0.2


def test_an_annotated_near_name_is_a_new_attribute():
  class New(Base):
    R_COS_MIN_RATIO: float = 0.2

  assert New(R_COS_MIN_RATIO=0.3).R_COS_MIN_RATIO == 0.3


@pytest.mark.parametrize(
  ('name', 'value', 'message'),
  [
    ('num_layers', 3, 'has no attribute num_layers. Did you mean NUM_LAYERS'),
    ('num_layers', '3', 'begin with an underscore: _num_layers'),
    ('LAYERS', 3, 'has no attribute LAYERS. It is NUM_LAYERS here'),
    ('LR', 0.1, 'It is LEARNING_RATE here. If it is a new attribute, annotate it: LR: float = 0.1'),
    ('NUM_LAYER', 3, 'Did you mean NUM_LAYERS'),
    ('EMBEDDING_LOOKUP_STYLE', 'matmul', 'Leave it out: rows of the table are gathered'),
    ('TRAINABLE_PE_MAX_SEQ_LEN', 16384, 'It is MAX_POSITION_EMBEDDINGS here'),
    ('TARGET_LOG_PPLX', 2.5, 'Not supported: MAX_STEPS or EARLY_STOPPING_PATIENCE ends a run'),
    ('USE_MQA', True, 'It is NUM_KV_HEADS here .*1 is multi-query attention'),
    ('per_device_batch_size', 4, 'It is PERCORE_BATCH_SIZE here'),
    ('ici_fsdp_parallelism', 4, 'the axis data of ICI_MESH_SHAPE'),
    ('MODEL_CLASS', int, 'task\\(\\) says which model'),
    ('NUM_LAYERS', '3', "must be int, for example 12; got '3'"),
    ('NUM_LAYERS', 'three', "must be int, for example 12; got 'three'"),
    ('ICI_MESH_SHAPE', 8, 'must be list'),
  ],
)
def test_a_class_attribute_that_is_no_attribute_is_refused(name, value, message):
  with pytest.raises(UserError, match=message) as error:
    type('Mine', (GPT126M,), {name: value})
  assert '\n' not in str(error.value)
  with pytest.raises(UserError, match=message):  # through a mixin that is not an experiment
    type('Mine', (type('Plain', (), {name: value}), GPT126M), {})
  with pytest.raises(UserError, match=f'no attribute {name}|must be'):
    setattr(GPT126M(), name, value)


def test_what_a_class_may_hold_besides_attributes():
  class Plain:
    NEW: int = 1
    NUM_LAYERS = 6

  class Mine(Plain, GPT126M):
    """Of its own."""

    _private = 3
    ADDED: list[int] = [1]

    @property
    def HALF(self) -> int:
      return self.NEW // 2

    @functools.cached_property
    def cached(self):
      return self.NEW

    class Nested:
      anything = 3

    def method(self):
      return self.cached

    @staticmethod
    def static():
      return 4

  class Child(Mine):
    NEW = 8

  assert (Child().HALF, Child().method(), Child().static(), Child().NUM_LAYERS) == (4, 8, 4, 6)
  assert Child(NEW=2).HALF == 1


def test_an_instance_takes_attributes_of_their_types_alone():
  e = GPT126M()
  e.NUM_LAYERS = 5.0
  assert e.NUM_LAYERS == 5
  assert isinstance(e.NUM_LAYERS, int)
  with pytest.raises(UserError, match="NUM_LAYERS must be int, for example 12; got 'five'"):
    e.NUM_LAYERS = 'five'
  with pytest.raises(UserError, match=r'no attribute NUM_LAYER. Did you mean NUM_LAYERS'):
    e.NUM_LAYER = 5
  assert e.NUM_LAYERS == 5


@pytest.mark.parametrize('name', ['VOCAB_PATH', 'DATASET_PATH', 'CHECKPOINT_RESTORE_PATH'])
def test_paths_are_expanded_and_addresses_checked(monkeypatch, name):
  monkeypatch.setenv('HOME', '/home/me')
  assert parse(FlatTokens5B, name, '~/x') == '/home/me/x'
  assert parse(FlatTokens5B, name, '~') == '/home/me'
  assert parse(FlatTokens5B, name, 'a/~/x') == 'a/~/x'
  assert FlatTokens5B(**{name: '~/x'}).values()[name] == '/home/me/x'
  assert parse(FlatTokens5B, name, 'gs://bucket/x/') == 'gs://bucket/x'
  message = 'az://bucket/x: az:// is not supported; paxlite reads the object stores gs:// and s3://'
  with pytest.raises(UserError, match=f'^{name}: {message}'):
    parse(FlatTokens5B, name, 'az://bucket/x')
  with pytest.raises(UserError, match=f'FlatTokens5B.{name}: {message}'):
    FlatTokens5B(**{name: 'az://bucket/x'})
  with pytest.raises(UserError, match='user nobody_of_this_name does not exist'):
    parse(FlatTokens5B, name, '~nobody_of_this_name/x')


def test_paths_in_lists_are_expanded_too(monkeypatch):
  monkeypatch.setenv('HOME', '/home/me')
  assert parse(DemoGPT, 'TRAIN_FILES', '[~/a.txt,b.txt]') == ['/home/me/a.txt', 'b.txt']
  assert parse(DemoGPT, 'EVAL_TASKS', "['lambada:~/a.jsonl']") == ['lambada:/home/me/a.jsonl']
  assert parse(DemoGPT, 'EVAL_TASKS', '[lambada]') == ['lambada']
  with pytest.raises(UserError, match=r'TRAIN_FILES: s3://b/a.txt names no bucket'):
    parse(DemoGPT, 'TRAIN_FILES', '[s3://b/a.txt]')
  with pytest.raises(UserError, match='TRAIN_FILES must be list\\[str\\], for example'):
    DemoGPT(TRAIN_FILES=3)


@pytest.mark.parametrize(
  ('value', 'flag'),
  [
    (3, 'X=3'),
    ('bfloat16', 'X=bfloat16'),
    ([1, 2, 1], "'X=[1,2,1]'"),
    (['data', 'mdl'], "'X=[data,mdl]'"),
    (['3', 'True'], '\'X=["3","True"]\''),
    (['a, b', '.*/w'], '\'X=["a, b",".*/w"]\''),
  ],
)
def test_flags_in_messages_are_quoted_and_read_back(value, flag):
  class Any(Base):
    X: type(value) if not isinstance(value, list) else list[type(value[0])] = value

  assert shell.flag('X', value) == flag
  (word,) = shlex.split(flag)
  assert parse(Any, 'X', word.partition('=')[2]) == value


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
      ['data/*.jsonl', 'tfds:c4/en:3.0.1/train[:9%]'],
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
    ('zzz', '3', 'no attribute zzz. paxlite show Base lists them'),
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
  derived |= {'LR_COS_DECAY_START', 'LR_LRED_DECAY_START', 'LR_DECAY_ENDS', 'LR_DECAY_STEPS'}
  derived |= {'LEARNING_RATE_FACTORS', 'WEIGHT_DECAY_FACTORS', 'USE_QKV_BIAS'}
  derived |= {'PREDICTION_LOSS_WEIGHT', 'ATTENTION_TEMPERATURE_FLOOR'}
  derived |= {'NORM_SCALE_OFFSET', 'OUTPUT_INIT_STD'}
  derived |= {'TRAINABLE_VARIABLES', 'USE_TE', 'TE_RECIPE', 'UNROLL_LAYERS'}
  derived |= {'MAX_POSITION_EMBEDDINGS', 'REFERENCE_RESTORE_PATH'}
  assert set(cfg.__arguments__) == set(attribute_types(GPT126M)) - derived
  cfg.NUM_LAYERS = 3
  built = fdl.build(cfg)
  assert isinstance(built, Experiment)
  assert built.values() == {**GPT126M().values(), 'NUM_LAYERS': 3}


def test_lists_of_a_class_are_not_shared_with_its_configs():
  cfg = GPT126M.config()
  cfg.ICI_MESH_SHAPE[0] = 99
  assert GPT126M.ICI_MESH_SHAPE == [8, 1, 1]
  assert GPT126M.config().ICI_MESH_SHAPE == [8, 1, 1]


def test_an_error_in_a_property_is_not_hidden():
  class Mine(TinyGPT):
    @property
    def HIDDEN_DIMS(self) -> int:
      return self.MODEL_DIM * 4

  with pytest.raises(AttributeError, match='MODEL_DIM'):
    Mine().HIDDEN_DIMS  # noqa: B018


def test_text_that_is_none_is_refused_by_its_attribute():
  """A name of a file may have bytes that are no UTF-8."""
  from paxlite.experiments.finetuning import LLaMA7BSFT

  with pytest.raises(UserError, match=r"TRAIN_FILES: '\\udd00' is not valid text"):
    LLaMA7BSFT(TRAIN_FILES=['a', '\udd00']).check_bounds()
  LLaMA7BSFT(TRAIN_FILES=['\udcff']).check_bounds()


def test_a_chat_template_is_its_file_or_its_text(tmp_path):
  """In a class, in Python and on the command line alike, and kept as a text."""
  from paxlite.config.attributes import parse
  from paxlite.experiments.parts.decoding import Decoding

  file, text = tmp_path / 'chat.jinja', '{{ messages[0].content }}'
  file.write_text(text)
  stated = type('Stated', (Decoding,), {'CHAT_TEMPLATE': str(file), '__module__': 'mine'})
  assert text == stated.CHAT_TEMPLATE
  assert text == Decoding(CHAT_TEMPLATE=str(file)).CHAT_TEMPLATE
  assert parse(Decoding, 'CHAT_TEMPLATE', str(file)) == text
  file.unlink()
  with pytest.raises(UserError, match=r'Decoding.CHAT_TEMPLATE: the file .* does not exist'):
    Decoding(CHAT_TEMPLATE=str(file))
