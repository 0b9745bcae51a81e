"""Keys that are harmless, neutral values, numbers that loops run over, and ids that end a text."""

import pathlib

import pytest

from paxlite.core.errors import UserError
from paxlite.weights.families import config_json, end_ids, experiment_of
from paxlite.weights.known_keys import HARMLESS, NEUTRAL, check_quantization

SMALL = dict(
  model_type='llama', vocab_size=96, hidden_size=32, intermediate_size=56, num_hidden_layers=2,
  num_attention_heads=4, max_position_embeddings=128, rms_norm_eps=1e-6, hidden_act='silu',
)  # fmt: skip
WHERE = pathlib.Path('config.json')
YARN = dict(rope_type='yarn', factor=4.0, original_max_position_embeddings=16)


def read(**changes):
  return experiment_of(SMALL | changes, WHERE)


@pytest.mark.parametrize(
  'changes',
  [
    dict(torchscript=False), dict(pruned_heads={}), dict(temperature=0.7), dict(_name_or_path='x'),
    dict(_comment='a note'), dict(rope_scaling=YARN | dict(finetuned=True)), dict(head_dim=None),
  ],
)  # fmt: skip
def test_keys_without_an_effect_are_accepted(changes):
  read(**changes)


@pytest.mark.parametrize(
  ('changes', 'match'),
  [
    (dict(pruned_heads={'0': [1]}), r"pruned_heads=\{'0': \[1\]\} is not supported"),
    (dict(_scale=2.0), '_scale=2.0 is not supported: it may change'),
    (dict(logit_scale=2.0), 'logit_scale=2.0 is not supported: it may change'),
    (dict(note='x' * 1000), 'x…'),
    (dict(rope_parameters=dict(factor=4.0)), 'factor=4.0 has no effect with rope_type default'),
    (dict(rope_scaling=YARN | dict(attention_factor=0.0)), 'attention_factor=0.0 must be'),
    (dict(rope_theta=0), 'rope_theta=0 must be a number above 0'),
    (dict(partial_rotary_factor=0.0), 'partial_rotary_factor=0.0 must be a number above 0'),
    (dict(rope_scaling=dict(YARN, rope_type='linear', mscale=1.0)), 'has no effect with rope_type'),
    (dict(rope_parameters=dict(full_attention=YARN)), 'full_attention=.* is not supported'),
    (dict(num_hidden_layers=4_000_000_000), 'num_hidden_layers=4000000000 must be from 0'),
    (dict(num_hidden_layers=2.0), 'num_hidden_layers=2.0 must be an integer'),
    (dict(num_nextn_predict_layers=10**12), 'num_nextn_predict_layers=.* must be from 0 to 100'),
    (dict(num_mtp_layers=101), 'num_mtp_layers=101 must be from 0 to 100'),
    (dict(model_type='mistral', num_key_value_heads=4, sliding_window=0), 'sliding_window=0 must'),
    (dict(num_key_value_heads=0), 'NUM_KV_HEADS'),
    (dict(head_dim=0), 'DIMS_PER_HEAD'),
    (dict(eos_token_id='</s>'), "eos_token_id '</s>' is not an id"),
    (dict(eos_token_id=[1.0]), 'eos_token_id 1.0 is not an id'),
    (dict(model_type='gemma2', attn_logit_softcapping=0.0), 'attn_logit_softcapping=0.0 must'),
  ],
)  # fmt: skip
def test_what_is_not_understood_is_refused(changes, match):
  gemma = dict(
    head_dim=8, num_key_value_heads=4, query_pre_attn_scalar=8, final_logit_softcapping=None,
    sliding_window=4,
  )  # fmt: skip
  with pytest.raises(UserError, match=match):
    read(**(gemma if changes.get('model_type') == 'gemma2' else {}) | changes)


def test_ids_that_end_a_text_come_from_all_files(caplog):
  """Those of generation_config.json come first; one that the model does not have is said."""
  one = SMALL | dict(eos_token_id=7)
  assert experiment_of(one, WHERE, [5, 6]).EOS_IDS == [5, 6, 7]
  assert experiment_of(one, WHERE, 7).EOS_IDS == [7]
  assert experiment_of(SMALL | dict(eos_token_id=None), WHERE, [5]).EOS_IDS == [5]
  assert experiment_of(one, WHERE, None).EOS_IDS == [7]
  assert end_ids([3, 200, 3], 96) == [3]
  assert 'eos_token_id 200 is never generated: the model has 96 ids' in caplog.text
  with pytest.raises(UserError, match='at most 64'):
    end_ids(list(range(90)), 96)


@pytest.mark.parametrize(
  ('found', 'match'),
  [
    (dict(quant_method='gptq'), 'is not supported'),
    (dict(quant_method='fp8', fmt='e5m2'), "quantization_config: fmt='e5m2' is not"),
    (dict(quant_method='fp8', tomorrow=1), 'quantization_config: tomorrow=1 is not'),
    ([], 'is not supported'),
  ],
)
def test_other_quantizations_are_refused(found, match):
  check_quantization(dict(quant_method='fp8', fmt='e4m3', weight_block_size=[2, 2]))
  with pytest.raises(UserError, match=match):
    check_quantization(found)


def test_no_key_is_in_two_tables():
  assert not HARMLESS & NEUTRAL.keys()


@pytest.mark.parametrize('groups', [1, 2])
def test_numbers_that_transformers_computes_with_are_never_null(groups):
  """Kimi K2 and Moonlight have one group; DeepSeek models may have no shared expert."""
  from paxlite.experiments.deepseek import DeepSeekV3

  e = DeepSeekV3(
    NUM_EXPERT_GROUPS=groups, NUM_EXPERT_GROUPS_PER_TOKEN=1, NUM_EXPERTS=8, NUM_EXPERTS_PER_TOKEN=2,
    NUM_SHARED_EXPERTS=0,
  )  # fmt: skip
  written = config_json(e, 'float32', None)
  assert (written['n_group'], written['topk_group'], written['n_shared_experts']) == (groups, 1, 0)


@pytest.mark.parametrize('cap', [0.0, -2.0])
def test_a_cap_that_is_off_is_written_as_null(cap):
  from paxlite.experiments.gemma import Gemma2_2B

  written = config_json(Gemma2_2B(ATTEN_LOGIT_CAP=cap), 'float32', None)
  assert written['attn_logit_softcapping'] is None
