"""Parts that an experiment gets when an attribute of theirs is set."""

import copy
import json
import pickle

import fiddle as fdl
import pytest

from paxlite.adapters.attributes import AdapterChoices
from paxlite.checkpointing.source import Source
from paxlite.config.attributes import attribute_types
from paxlite.config.templates import config_text
from paxlite.core.errors import UserError
from paxlite.experiments import options
from paxlite.experiments.base import full_name
from paxlite.experiments.demo import TinyGPT
from paxlite.experiments.finetuning import HuggingFaceSFT
from paxlite.experiments.identity import (
  identity_of,
  refuse_other_experiment,
  refuse_other_model,
  stated_values,
  write_configuration,
)
from paxlite.experiments.llama import LLaMA3_8B, SmolLM135M
from paxlite.experiments.parts.attention_temperature import AttentionTemperature
from paxlite.experiments.registry import class_of
from paxlite.generation.inference import experiment_of
from paxlite.programs.launch import build_experiment

# what every language model had, with the values that it had
FORMER = dict(
  USE_ATTENTION_SINKS=False, SCALE_EMBEDDING=False, EMBEDDING_FACTOR=1.0, LOGITS_DIVISOR=1.0,
  ROPE_LOCAL_THETA=0.0, ROPE_STRETCHES_LOCAL=True, USE_SOFTMAX_BIAS=False, ROPE_SHORT_FACTORS=[],
  ROPE_LONG_FACTORS=[], BLOCK_ORDER='sequential', ROPE_FRACTION=1.0, NUM_PREDICTION_MODULES=0,
  PREDICTION_LOSS_WEIGHT=0.3, ATTENTION_TEMPERATURE_SCALE=0.0, ATTENTION_TEMPERATURE_FLOOR=8192,
  RESIDUAL_FACTOR=1.0, USE_OUTPUT_GATE=False, QK_NORM_AFTER_ROTATION=False,
)  # fmt: skip


def test_a_class_does_not_show_what_few_models_have():
  assert FORMER.keys().isdisjoint(LLaMA3_8B().values())
  assert len(LLaMA3_8B().shown_values()) <= 140
  assert sum(cls.__module__.startswith('paxlite.experiments') for cls in LLaMA3_8B.__mro__) <= 18


IDLE = dict(MUON_MOMENTUM=0.9, LR_WARMUP=7, LR_DECAY_ENDS=[9], LORA_RANK=4, EVAL_CHAT=True)


@pytest.mark.parametrize('name', IDLE)
def test_what_does_nothing_is_a_value_where_it_is_stated(name):
  assert name not in LLaMA3_8B().shown_values()
  assert name not in fdl.build(LLaMA3_8B.config()).shown_values()
  stated = LLaMA3_8B(**{name: IDLE[name]})
  assert stated.replaced(SEED=7).shown_values()[name] == IDLE[name]
  assert stated_values(LLaMA3_8B, stated.values())[name] == IDLE[name]
  mine = type('Mine', (LLaMA3_8B,), {name: IDLE[name], '__module__': 'mine'})
  assert mine().shown_values()[name] == IDLE[name]


def test_what_an_attribute_needs_is_shown_beside_it():
  e = LLaMA3_8B(OPTIMIZER='muon', LR_SCHEDULE='linear', USE_LORA=True)
  shown = 'MUON_UPDATE_RMS', 'LR_WARMUP', 'LR_DECAY_ENDS', 'LORA_RANK'
  assert {*shown} <= e.shown_values().keys()
  assert {'SOAP_FREQUENCY', 'ADAM_CLIP_THRESHOLD', 'LR_DECAY_SHAPE'} & e.shown_values().keys() == {
    'ADAM_CLIP_THRESHOLD'  # which LLaMA states
  }


def test_a_run_whose_file_has_what_does_nothing_continues(tmp_path):
  write_configuration(TinyGPT(), tmp_path)
  path = tmp_path / 'experiment.json'
  found = json.loads(path.read_text())
  every = {name: getattr(TinyGPT(), name) for name in attribute_types(TinyGPT)}
  path.write_text(json.dumps(found | {'values': every}))
  refuse_other_experiment(TinyGPT(), tmp_path)
  path.write_text(json.dumps(found | {'values': every | dict(LORA_RANK=9)}))
  with pytest.raises(UserError, match='LORA_RANK 9 → 8'):
    refuse_other_experiment(TinyGPT(), tmp_path)


def test_an_attribute_of_a_part_brings_the_part():
  e = build_experiment(
    'SmolLM135M', [], {'ATTENTION_TEMPERATURE_SCALE': '0.1', 'RESIDUAL_FACTOR': '0.5'}
  )
  assert isinstance(e, SmolLM135M)
  assert isinstance(e, AttentionTemperature)
  assert full_name(type(e)) == full_name(SmolLM135M)
  text = config_text(e.build_task())
  assert 'position_scale_tpl.growth = 0.1' in text
  assert 'post_norm_tpl.factor = 0.5' in text
  assert type(e.replaced(NUM_LAYERS=2)) is type(e)
  assert type(SmolLM135M(ATTENTION_TEMPERATURE_SCALE=0.1, RESIDUAL_FACTOR=0.5)) is type(e)


def test_a_file_of_a_run_has_the_parts_of_its_class():
  e = SmolLM135M(ATTENTION_TEMPERATURE_SCALE=0.1)
  assert class_of(json.loads(json.dumps(identity_of(e)))) is type(e)
  tuned = HuggingFaceSFT.of_values(dict(MODEL='SmolLM135M', ATTENTION_TEMPERATURE_SCALE=0.1))
  assert issubclass(tuned, AttentionTemperature)
  assert tuned.of_values(dict(MODEL='SmolLM135M', ATTENTION_TEMPERATURE_SCALE=0.1)) is tuned


def test_a_run_of_before_continues_and_one_that_used_what_is_gone_does_not(tmp_path):
  write_configuration(TinyGPT(), tmp_path)
  path = tmp_path / 'experiment.json'
  found = json.loads(path.read_text())

  def before(**values):
    path.write_text(json.dumps(found | {'values': found['values'] | FORMER | values}))
    return json.loads(path.read_text())

  assert class_of(before()) is TinyGPT
  refuse_other_experiment(TinyGPT(), tmp_path)
  assert class_of(before(ATTENTION_TEMPERATURE_SCALE=0.1)) is not TinyGPT
  with pytest.raises(UserError, match=r"ATTENTION_TEMPERATURE_SCALE 0\.1 → 'unset'"):
    refuse_other_experiment(TinyGPT(), tmp_path)
  refuse_other_experiment(TinyGPT(ATTENTION_TEMPERATURE_SCALE=0.1), tmp_path)


@pytest.mark.parametrize(
  ('name', 'way_out'),
  [('USE_OUTPUT_GATE', 'Qwen3_5 of .*qwen_hybrid'), ('QK_NORM_AFTER_ROTATION', 'HunyuanDense of ')],
)
def test_what_other_models_alone_have_now_is_refused_wherever_it_is_given(name, way_out, tmp_path):
  write_configuration(TinyGPT(), tmp_path)
  path = tmp_path / 'experiment.json'
  found = json.loads(path.read_text())
  values = found['values'] | {name: True}
  path.write_text(json.dumps(found | {'values': values}))
  source = Source(tmp_path, path)
  for use in (
    lambda: stated_values(TinyGPT, values),
    lambda: experiment_of(source),
    lambda: refuse_other_model(TinyGPT(), tmp_path),
    lambda: build_experiment('LLaMA3_8B', [], {name: 'True'}),
    lambda: LLaMA3_8B(**{name: True}),
    lambda: type('Mine', (LLaMA3_8B,), {name: True, '__module__': __name__}),
  ):
    with pytest.raises(UserError, match=f'has no attribute {name}, .* derive it from {way_out}'):
      use()
  path.write_text(json.dumps(found | {'values': values | {name: False}}))
  assert type(experiment_of(Source(tmp_path, path))) is TinyGPT


def test_a_class_names_the_part_whose_attribute_it_states():
  with pytest.raises(UserError, match=r'write class Mine\(AttentionTemperature, …\)') as error:
    type('Mine', (SmolLM135M,), {'ATTENTION_TEMPERATURE_SCALE': 0.1, '__module__': __name__})
  assert 'from paxlite.experiments.parts.attention_temperature' in str(error.value)
  mine = type(
    'Mine',
    (AttentionTemperature, SmolLM135M),
    {'ATTENTION_TEMPERATURE_SCALE': 0.1, '__module__': __name__},
  )
  assert mine().ATTENTION_TEMPERATURE_SCALE == 0.1


def test_a_leaf_adds_such_parts():
  with pytest.raises(UserError, match=r'write class Mine\(AdapterChoices, …\), with Adapter'):
    type('Mine', (SmolLM135M,), dict(USE_LORA=True, LORA_ALPHA=4.0, __module__=__name__))
  body = dict(USE_LORA=True, LORA_ALPHA=4.0, __module__=__name__)
  mine = type('Mine', (AdapterChoices, SmolLM135M), body)
  assert 'factor_scale = 0.5' in config_text(mine().build_task())
  e = build_experiment('SmolLM135M', [], dict(USE_LORA='True', LORA_ALPHA='4'))
  assert config_text(e.build_task()) == config_text(mine().build_task())
  assert class_of(json.loads(json.dumps(identity_of(e)))) is type(e)
  assert 'LORA_ALPHA' not in SmolLM135M(USE_LORA=True, LORA_ALPHA=None).values()


def sets(cfg):
  cfg.RESIDUAL_FACTOR = 0.44


def doubles(cfg):
  cfg.RESIDUAL_FACTOR *= 2


@pytest.mark.parametrize('function', [sets, doubles])
def test_a_fiddler_learns_which_part_has_an_attribute(function):
  fiddler = f'{__name__}.{function.__name__}'
  message = rf'--fiddler={fiddler}: .* write class SmolLM135M\(ResidualFactor, …\)'
  with pytest.raises(UserError, match=message):
    build_experiment('SmolLM135M', [fiddler], {})
  assert build_experiment('Granite3_2B', [fiddler], {}).RESIDUAL_FACTOR == 0.44


@pytest.mark.parametrize('name', sorted(FORMER))
@pytest.mark.parametrize('how', ['value', 'annotated', 'property', 'plain mixin'])
def test_an_attribute_that_nothing_reads_is_refused_however_it_is_stated(name, how):
  stated = property(lambda self: FORMER[name]) if how == 'property' else FORMER[name]
  body = {name: stated, '__module__': __name__}
  if how in ('annotated', 'plain mixin'):
    body['__annotations__'] = {name: type(FORMER[name])}
  bases = (type('Plain', (), body), SmolLM135M) if how == 'plain mixin' else (SmolLM135M,)
  with pytest.raises(UserError, match=f'Mine has no attribute {name}, which belongs to'):
    type('Mine', bases, {'__module__': __name__} if how == 'plain mixin' else body)


@pytest.mark.parametrize(
  ('name', 'values', 'said'),
  [
    ('DeepSeekV4_Flash', dict(BLOCK_ORDER='parallel'), 'DeepSeekV4_Flash has others'),
    ('DeepSeekV4_Flash', dict(RESIDUAL_FACTOR='0.5'), 'DeepSeekV4_Flash has others'),
    (
      'LLaMA3_8B',
      dict(RESIDUAL_FACTOR='0.5', BLOCK_ORDER='parallel'),
      'BLOCK_ORDER=sequential, and',
    ),
    ('DeepSeekV4_Flash', dict(NUM_PREDICTION_MODULES='1'), 'is not supported'),
    ('DeepSeekV4_Flash', dict(ATTENTION_TEMPERATURE_SCALE='0.1'), 'it must be 0'),
    ('DeepSeekV3_671B', dict(ROPE_FRACTION='0.5'), 'ROPE_FRACTION=0.5 must be 1'),
    ('LLaMA3_8B', dict(ROPE_SCALING='longrope', ROPE_FACTOR='2'), 'needs ROPE_SHORT_FACTORS'),
  ],
)
def test_parts_that_do_not_fit_are_refused(name, values, said):
  with pytest.raises(UserError, match=said):
    build_experiment(name, [], values)


@pytest.mark.parametrize('steps', [[], ['RESIDUAL_FACTOR'], ['RESIDUAL_FACTOR', 'SCALE_EMBEDDING']])
def test_an_experiment_with_parts_is_pickled_and_copied(steps):
  cls = TinyGPT
  for name in steps:
    cls = options.with_attributes(cls, [name])
  e = cls(NUM_LAYERS=3)
  for made in (pickle.loads(pickle.dumps(e)), copy.copy(e), copy.deepcopy(e)):
    assert type(made) is type(e)
    assert made.values() == e.values()
