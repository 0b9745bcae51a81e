"""What a config.json means that leaves a key out, or states an unusual value, to transformers."""

import copy
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from paxlite.core.errors import UserError
from paxlite.experiments.cases import BLOCK, YARN
from paxlite.weights.config_keys import read_keys
from paxlite.weights.families import config_json, experiment_of
from paxlite.weights.family_tables import FAMILIES
from tests.support.families import CASES

SMALL = {'llama': BLOCK, 'gemma': BLOCK, 'gpt2': dict(n_embd=32, n_head=4, n_layer=3)} | CASES


def known(case: str) -> dict[str, Any]:
  """Returns transformers' config.json of a case, with the keys that decide what it computes."""
  transformers = pytest.importorskip('transformers')
  kind = case.partition(' ')[0]
  config = transformers.AutoConfig.for_model(kind, **SMALL[case]).to_dict()
  names = {name for key in FAMILIES[kind].keys for name in key.theirs}
  return {k: v for k, v in config.items() if k in names or k == 'model_type'}


def shorter(config: dict[str, Any], path: tuple = ()) -> Iterator[tuple[tuple, dict[str, Any]]]:
  """Yields copies that lack one key or have null for it, at any depth."""
  for name, value in config.items():
    yield (*path, name), {k: v for k, v in config.items() if k != name}
    yield (*path, name), config | {name: None}
    if isinstance(value, dict):
      for found, inner in shorter(value, (*path, name)):
        yield found, config | {name: inner}


def values(config: dict[str, Any]) -> Any:
  """Returns the attributes of a config that decide the model, or None if it is refused."""
  family = FAMILIES[config['model_type']]
  try:
    experiment = family.experiment(**read_keys(family.keys, config))
    experiment.validate()
    # transformers' model computes no prediction modules; whether there are some, the tensors say
    return experiment.replaced(NUM_PREDICTION_MODULES=0).model_values
  except (AttributeError, KeyError, TypeError, UserError):
    return None


@pytest.mark.cases(fast=10, slow=2)
@pytest.mark.parametrize('case', SMALL)
def test_a_missing_key_or_null_means_what_it_means_to_transformers_or_is_refused(case):
  transformers = pytest.importorskip('transformers')
  from huggingface_hub.errors import StrictDataclassError

  whole = known(case)
  kind = whole['model_type']
  made = type(transformers.AutoConfig.for_model(kind))
  compared = 0
  for path, config in shorter(whole):
    ours = values(config) if path != ('model_type',) else None
    if ours is None:
      continue
    try:
      theirs = made.from_dict(config).to_dict()
    except (KeyError, TypeError, StrictDataclassError):  # transformers refuses it
      continue
    expected = values({k: v for k, v in theirs.items() if k in whole})
    if expected is not None:
      assert ours == expected, path
      compared += 1
  assert compared > 3


def sources(rng) -> dict[str, Any]:
  """Returns keys about rotary positions, of which several may say something else."""
  yarn = YARN | dict(factor=float(rng.choice([1.0, 4.0])))
  yarn |= {} if rng.integers(2) else dict(attention_factor=0.7)
  linear = dict(rope_type='linear', factor=2.0)
  plain = dict(rope_type='default', rope_theta=77.0)
  flat = [yarn, linear, plain, {}, None, yarn | dict(rope_theta=33.0)]
  nested = dict(
    full_attention=flat[rng.integers(len(flat))], sliding_attention=dict(plain, rope_theta=55.0)
  )
  parameters = [*flat, nested, dict(full_attention=yarn), dict(sliding_attention=plain)]
  options = dict(
    rope_parameters=parameters,
    rope_scaling=flat,
    rope_theta=[11.0],
    rope_local_base_freq=[22.0],
    partial_rotary_factor=[None, 1.0],
  )
  return {k: v[rng.integers(len(v))] for k, v in options.items() if rng.integers(2)}


@pytest.mark.cases(fast=0, slow=3)
@pytest.mark.slow
@pytest.mark.parametrize('case', ['llama', 'qwen3', 'gemma3_text', 'olmo3', 'gpt_oss', 'phi3'])
def test_two_sources_of_rotary_positions_mean_what_they_mean_to_transformers(case):
  """rope_scaling and rope_parameters, nested or not, and bases and factors beside them."""
  transformers = pytest.importorskip('transformers')
  from huggingface_hub.errors import StrictDataclassError

  whole = known(case)
  names = ('rope_parameters', 'rope_scaling', 'rope_theta', 'rope_local_base_freq')
  whole = {k: v for k, v in whole.items() if k not in names}
  made = type(transformers.AutoConfig.for_model(whole['model_type']))
  compared = 0
  for seed in range(150):
    config = whole | sources(np.random.default_rng(seed))
    ours = values(config)
    if ours is None:
      continue
    try:
      theirs = made.from_dict(copy.deepcopy(config)).to_dict()
    except StrictDataclassError:  # transformers refuses it
      continue
    kept = {k: v for k, v in theirs.items() if k in whole or k in names}
    assert ours == values(kept), config
    compared += 1
  assert compared > 15


# Values that once were read as something else than transformers reads.
REFUSED = {
  'norm_topk_prob=True': ('deepseek_v2', dict(norm_topk_prob=True)),
  'rope_interleave=None': ('deepseek_v3', dict(rope_interleave=None)),
  'it must be qk_rope_head_dim=4': ('deepseek_v3', dict(head_dim=2)),
  'more than the experts of NUM_EXPERT_GROUPS_PER_TOKEN=2': (
    'deepseek_v3', dict(num_experts_per_tok=6),
  ),
  'attention_factor is not implemented where': (
    'deepseek_v3', dict(rope_parameters=YARN | dict(attention_factor=2.0)),
  ),
  r'more max_position_embeddings \(64\)': ('phi3 longrope', dict(max_position_embeddings=64)),
  'original_max_position_embeddings is 32, and 64': (
    'phi3 longrope', dict(original_max_position_embeddings=32),
  ),
  'moe_layer_end_index=4 before': ('ernie4_5_moe', dict(moe_layer_end_index=4)),
  "moe_gate='x'": ('ernie4_5_moe', dict(moe_gate='x')),
  'llama_4_scaling_beta is implemented for rope_type yarn': (
    'ministral3',
    dict(rope_parameters=dict(rope_type='linear', factor=2.0, llama_4_scaling_beta=0.1)),
  ),
  'has no llama_4_scaling_beta': ('ministral3', dict(rope_parameters=YARN)),
  'partial_rotary_factor=0.5 is not implemented: it must be 0.4': (
    'mistral4',
    dict(rope_parameters=YARN | dict(llama_4_scaling_beta=0.1, partial_rotary_factor=0.5)),
  ),
  "rope_type 'proportional' is not implemented": (
    'llama yarn', dict(rope_parameters=dict(rope_type='proportional', factor=2.0)),
  ),
  'mscale=2.0 of rope_type dynamic is not implemented': (
    'hunyuan_v1_dense', dict(rope_parameters=dict(rope_type='dynamic', factor=2.0, mscale=2.0)),
  ),
  "factor='x' must be a number above 0": (
    'llama yarn', dict(rope_parameters=dict(rope_type='dynamic', factor='x')),
  ),
  'use_cla=True': ('hunyuan_v1_dense', dict(use_cla=True)),
  'layer_types with sliding_attention needs': ('exaone4', dict(sliding_window=None)),
  'head_dim=8 is not implemented': ('gpt_neox', dict(head_dim=8)),
  'use_pos_enc=False': ('lfm2', dict(use_pos_enc=False)),
  'conv_dim=16 is not implemented: it must be hidden_size=32': ('lfm2', dict(conv_dim=16)),
  'layer_types must have 4 of conv': ('lfm2', dict(layer_types=['conv'] * 3)),
  'mamba_n_heads=4 × mamba_d_head=5': ('granitemoehybrid', dict(mamba_d_head=5)),
  'time_step_limit=None': ('granitemoehybrid', dict(time_step_limit=None)),
  'time_step_limit has -1.0': ('granitemoehybrid', dict(time_step_limit=[-1.0, 2.0])),
  "normalization_function='layernorm'": (
    'granitemoehybrid', dict(normalization_function='layernorm'),
  ),
  'MAMBA_HEADS=4 is not divisible by MAMBA_GROUPS=3': ('nemotron_h', dict(n_groups=3)),
  'moe_latent_size=16': ('nemotron_h', dict(moe_latent_size=16)),
  'hybrid_override_pattern=.MX. must be of': (
    'nemotron_h', dict(layers_block_type=None, hybrid_override_pattern='MX'),
  ),
  'tie_word_embeddings=True': ('nemotron_h', dict(tie_word_embeddings=True)),
  'mamba_n_heads=4 × mamba_d_head=5 must be 48': ('falcon_h1', dict(mamba_d_head=5)),
  'projectors_bias=True beside': ('falcon_h1', dict(projectors_bias=True)),
  'ssm_multipliers=.1.0. must be 5 numbers': ('falcon_h1', dict(ssm_multipliers=[1.0])),
  'lm_head_multiplier=0.0 must be': ('falcon_h1', dict(lm_head_multiplier=0.0)),
  'mamba_use_mlp=False': ('falcon_h1', dict(mamba_use_mlp=False)),
  'mlp_layer_types must have 4 of dense': (
    'kimi_linear', dict(mlp_layer_types=['sparse', 'dense', 'sparse', 'sparse']),
  ),
  'linear_attn_config has gate_lower_bound': (
    'kimi_linear', dict(linear_attn_config=dict(gate_lower_bound=-5.0)),
  ),
  'linear_attn_config must have each of the numbers 1 to 4': (
    'kimi_linear',
    dict(layer_types=None, linear_attn_config=dict(kda_layers=[1, 2], full_attn_layers=[4])),
  ),
  'mla_use_nope=False': ('kimi_linear', dict(mla_use_nope=False)),
  'num_shared_experts=0 must be': ('kimi_linear', dict(num_shared_experts=0)),
  "use_qk_norm='false' must be true or false": ('glm4_moe', dict(use_qk_norm='false')),
  'use_parallel_residual=1 must be true or false': ('gpt_neox', dict(use_parallel_residual=1)),
  "use_bias='false' must be true or false": ('ernie4_5_moe', dict(use_bias='false')),
  "linear_allow_neg_eigval='no' must be": ('olmo_hybrid', dict(linear_allow_neg_eigval='no')),
  "tie_word_embeddings='false' must be": ('llama', dict(tie_word_embeddings='false')),
  "use_sliding_window='false' must be": ('qwen2', dict(use_sliding_window='false')),
  "conv_bias='true' must be": ('lfm2', dict(conv_bias='true')),
  'moe_layer_interval=0 must be an integer of at least 1': (
    'ernie4_5_moe', dict(moe_layer_interval=0),
  ),
  "moe_layer_start_index='x' must be an integer": (
    'ernie4_5_moe', dict(moe_layer_start_index='x'),
  ),
  "full_attention_interval='x' must be an integer of at least 1": (
    'qwen3_5_text', dict(layer_types=None, full_attention_interval='x'),
  ),
  'full_attention_interval=0 must be': (
    'olmo_hybrid', dict(layer_types=None, full_attention_interval=0),
  ),
  'no_rope_layer_interval=0 must be': ('smollm3', dict(no_rope_layer_interval=0)),
  'layer_types with sliding_attention and sliding_window=None': (
    'smollm3', dict(layer_types=['sliding_attention'] * 5),
  ),
  'mlp_layer_types=.* dense blocks first': (
    'glm4_moe_lite', dict(mlp_layer_types=['sparse', 'dense', 'sparse', 'sparse']),
  ),
  'first_k_dense_replace=3 and the 2 dense blocks': (
    'glm4_moe_lite', dict(first_k_dense_replace=3),
  ),
  'QUERY_LATENT_DIMS must be above 0': ('deepseek_v32', dict(q_lora_rank=None)),
  'INDEXER_DIMS_PER_HEAD=2 must be at least': ('deepseek_v32', dict(index_head_dim=2)),
  'layer_types=.* must have indexed_attention': (
    'deepseek_v32', dict(layer_types=['full_attention'] * 4),
  ),
  'indexer_types=.*the first one full': (
    'glm_moe_dsa', dict(indexer_types=['shared', 'full', 'full', 'full']),
  ),
  'index_topk_pattern=.FFXF.*must have full or': (
    'glm_moe_dsa', dict(indexer_types=None, index_topk_pattern='FFXF'),
  ),
  'indexers that layers share .1 of 4': ('deepseek_v32', dict(index_topk_pattern='FFSF')),
  'indexers that layers share .2 of 4': ('deepseek_v32', dict(index_topk_freq=4)),
  'indexer_rope_interleave=False': ('glm_moe_dsa', dict(indexer_rope_interleave=False)),
  'mlp_layer_types=.* hash_moe first': (
    'deepseek_v4', dict(mlp_layer_types=['moe', *['hash_moe'] * 5]),
  ),
  'layer_types must have 6 of sliding_attention, compressed': (
    'deepseek_v4', dict(layer_types=['full_attention'] * 6),
  ),
  'compress_ratios has 8: only 0, 4 and 128': (
    'deepseek_v4', dict(layer_types=None, compress_ratios=[8] * 6),
  ),
  'compress_rates=.* must have': ('deepseek_v4', dict(compress_rates={'other_attention': 3})),
  "scoring_func='sigmoid'": ('deepseek_v4', dict(scoring_func='sigmoid')),
  'norm_topk_prob=False': ('deepseek_v4', dict(norm_topk_prob=False)),
  'n_shared_experts=2': ('deepseek_v4', dict(n_shared_experts=2)),
  'num_key_value_heads=2': ('deepseek_v4', dict(num_key_value_heads=2)),
  'of main is not implemented': ('deepseek_v4', dict(rope_parameters=dict(
    main=dict(rope_type='linear', rope_theta=1e4, factor=2.0),
    compress=dict(rope_type='default', rope_theta=1e4),
  ))),
  'partial_rotary_factor=0.25 of main must': ('deepseek_v4', dict(rope_parameters=dict(
    main=dict(rope_type='default', rope_theta=1e4, partial_rotary_factor=0.25),
    compress=dict(rope_type='default', rope_theta=1e4, partial_rotary_factor=0.5),
  ))),
  'NUM_HEADS=4 is not divisible by OUTPUT_GROUPS=3': ('deepseek_v4', dict(o_groups=3)),
  'SWIGLU_LIMIT=0 must be positive': ('deepseek_v4', dict(swiglu_limit=0.0)),
  'attn_type_list=': ('minimax_m2', dict(attn_type_list=[1, 0, 1, 1])),
  'use_routing_bias=False': ('minimax_m2', dict(use_routing_bias=False)),
  'num_hidden_layers=1000000000 must be from 0 to 2,000': (
    'llama yarn', dict(num_hidden_layers=10**9),
  ),
  "mamba_rms_norm='false' must be": ('falcon_h1', dict(mamba_rms_norm='false')),
  "mamba_norm_before_gate='no' must be": ('falcon_h1', dict(mamba_norm_before_gate='no')),
  "mamba_proj_bias='false' must be": ('falcon_h1', dict(mamba_proj_bias='false')),
  "attention_k_eq_v='false' must be": ('gemma4_text', dict(attention_k_eq_v='false')),
  "enable_moe_block='false' must be": ('gemma4_text', dict(enable_moe_block='false')),
  'per_layer_config=.1., .*: no model': ('gemma4_text', dict(per_layer_config=[1])),
  'layer_types=5: no model|layer_types=5, sliding_window': ('gemma4_text', dict(layer_types=5)),
  'rope_parameters=.*: no model': (
    'gemma4_text', dict(rope_parameters=dict(full_attention=3)),
  ),
  "attn_temperature_tuning='false' must be": (
    'llama4_text', dict(attn_temperature_tuning='false'),
  ),
  'no_rope_layer_interval=0 must be an': (
    'llama4_text', dict(no_rope_layers=None, no_rope_layer_interval=0),
  ),
  'interleave_moe_layer_step=0 must': (
    'llama4_text', dict(moe_layers=None, interleave_moe_layer_step=0),
  ),
  'attn_scale=None: no model': ('llama4_text', dict(attn_scale=None)),
  'moe_layers=.1.5.': ('llama4_text', dict(moe_layers=[1.5])),
  'rope_interleave=False': ('deepseek_v32', dict(rope_interleave=False)),
  'ROPE_BETA_FAST=0': ('llama yarn', dict(rope_parameters=YARN | dict(beta_fast=0.0))),
}  # fmt: skip


@pytest.mark.parametrize('message', REFUSED)
def test_values_that_are_refused(message):
  case, changes = REFUSED[message]
  config = known(case)
  assert values(config) is not None
  with pytest.raises(UserError, match=message):
    experiment_of(config | changes, pathlib.Path('config.json'))


@pytest.mark.parametrize('case', ['mixtral', 'qwen3_moe', 'olmoe', 'deepseek_v2', 'deepseek_v3'])
def test_experts_have_the_activation_of_the_file(case):
  for theirs, ours in {'silu': 'silu', 'gelu': 'gelu_exact'}.items():
    config = known(case) | dict(hidden_act=theirs)
    e = experiment_of(config, pathlib.Path('config.json'))
    assert ours == e.EXPERT_ACTIVATION_CLS
    assert config_json(e, 'float32', None)['hidden_act'] == theirs


def test_an_alpha_of_hunyuan_is_another_base():
  e = experiment_of(known('hunyuan_v1_dense'), pathlib.Path('config.json'))
  assert pytest.approx(1e4 * 1000 ** (10 / 8)) == e.ROPE_THETA
  written = config_json(e, 'float32', None)
  assert written['rope_theta'] == e.ROPE_THETA
  assert 'rope_scaling' not in written


def test_greedy_routing_has_no_groups():
  config = known('deepseek_v2') | dict(n_group=4, topk_group=2, topk_method='greedy')
  e = experiment_of(config, pathlib.Path('config.json'))
  assert (e.NUM_EXPERT_GROUPS, e.NUM_EXPERT_GROUPS_PER_TOKEN) == (1, 1)
