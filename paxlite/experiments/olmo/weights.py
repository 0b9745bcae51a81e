"""How the published models of OLMo are stored; see weights.family."""

from collections.abc import Mapping
from typing import Any

from paxlite.core.errors import UserError
from paxlite.core.json_text import JsonObject
from paxlite.experiments.language_model import LanguageModel
from paxlite.experiments.olmo import OLMo2, OLMo3, OLMoE, OLMoHybrid
from paxlite.weights import tensor_names
from paxlite.weights.config_keys import Both, Config, OneOf, Same, layer_types, write_types
from paxlite.weights.delta_keys import DELTA_KINDS, DELTA_NET, hybrid_types
from paxlite.weights.family import Family
from paxlite.weights.family_keys import (
  EXPERT_SILU,
  EXPERTS_PER_TOKEN,
  NO_BIAS,
  NORM_TOPK,
  PLAIN,
  SILU,
  SIZES,
  UNTIED,
)
from paxlite.weights.key_values import is_on
from paxlite.weights.rope_keys import rope
from paxlite.weights.state_layout import delta_net_entries

OLMO_HYBRID = tensor_names.OLMO2 | {
  'attention_norm': 'model.layers.{i}.attention_layer_norm.weight',
  'ffn_norm': 'model.layers.{i}.feedforward_layer_norm.weight',
  'delta_query': 'model.layers.{i}.linear_attn.q_proj.weight',
  'delta_key': 'model.layers.{i}.linear_attn.k_proj.weight',
  'delta_value': 'model.layers.{i}.linear_attn.v_proj.weight',
  'delta_gate': 'model.layers.{i}.linear_attn.g_proj.weight',
  'delta_beta': 'model.layers.{i}.linear_attn.b_proj.weight',
  'delta_decay_input': 'model.layers.{i}.linear_attn.a_proj.weight',
  'delta_query_convolution': 'model.layers.{i}.linear_attn.q_conv1d.weight',
  'delta_key_convolution': 'model.layers.{i}.linear_attn.k_conv1d.weight',
  'delta_value_convolution': 'model.layers.{i}.linear_attn.v_conv1d.weight',
  'delta_rate': 'model.layers.{i}.linear_attn.A_log',
  'delta_bias': 'model.layers.{i}.linear_attn.dt_bias',
  'delta_norm': 'model.layers.{i}.linear_attn.o_norm.weight',
  'delta_post': 'model.layers.{i}.linear_attn.o_proj.weight',
}


def types_without_positions(kinds: Mapping[str, str]) -> Both:
  """Returns the keys of the kinds of layers and of rotary positions, which a file may not have.

  Args:
    kinds: As for hybrid_types. Attention without positions is 'full_nope'.
  """
  types, whole = hybrid_types(kinds), rope()

  def has_positions(config: Config) -> bool:
    given = config.get('rope_scaling') or config.get('rope_parameters') or {}
    return config.get('rope_theta', given.get('rope_theta', 0)) is not None  # null says so

  def read(config: Config) -> dict[str, object]:
    values = types.read(config)
    if has_positions(config):
      return values | whole.read(config)
    pattern: Any = values['ATTENTION_PATTERN']
    return {'ATTENTION_PATTERN': ['full_nope' if kind == 'full' else kind for kind in pattern]}

  def write(e: LanguageModel) -> JsonObject:
    found = {kind.attention for kind in e.block_kinds}
    if 'full_nope' not in found:
      return types.write(e) | whole.write(e)
    if 'full' in found:
      raise UserError('Hugging Face has no family with full, full_nope and states')
    nope = {**kinds, 'full_attention': 'full_nope'}
    return {
      'layer_types': write_types(e, 'full_nope', nope),
      'rope_parameters': {'rope_type': 'default', 'rope_theta': None},
    }

  return Both((*types.theirs, *whole.theirs), (*types.ours, *whole.ours), read, write)


def _beta_scale(config: Config) -> dict[str, object]:
  return {'DELTA_BETA_SCALE': 2.0 if is_on(config, 'linear_allow_neg_eigval', True) else 1.0}


def _allows_negative(e: LanguageModel) -> JsonObject:
  scale = e.values()['DELTA_BETA_SCALE']
  if scale not in (1, 2):
    raise UserError(f'Hugging Face has no DELTA_BETA_SCALE={scale}: it is 1 or 2 there')
  return {'linear_allow_neg_eigval': scale == 2}


BETA_SCALE = Both(
  ('linear_allow_neg_eigval',), ('DELTA_BETA_SCALE',), _beta_scale, _allows_negative
)

FAMILIES: dict[str, Family] = {
  'olmo2': Family('Olmo2ForCausalLM', OLMo2, (*PLAIN, NO_BIAS), tensor_names.OLMO2),
  'olmo3': Family(
    'Olmo3ForCausalLM', OLMo3,
    (
      *SIZES, SILU, UNTIED, rope(theta=5e5, local_theta=5e5), NO_BIAS,
      layer_types([*['sliding'] * 3, 'full']),
    ),
    tensor_names.OLMO2,
  ),
  'olmoe': Family(
    'OlmoeForCausalLM', OLMoE,
    (
      *SIZES, EXPERT_SILU, UNTIED, rope(), NO_BIAS, EXPERTS_PER_TOKEN, NORM_TOPK,
      OneOf('clip_qkv', None), Same('num_experts', 'NUM_EXPERTS'),
    ),
    classifier=None,
  ),
  'olmo_hybrid': Family(
    'OlmoHybridForCausalLM', OLMoHybrid,
    (
      *SIZES, SILU, UNTIED, NO_BIAS, *DELTA_NET, BETA_SCALE, types_without_positions(DELTA_KINDS),
    ),
    OLMO_HYBRID,
    other_names={'feedforward_layer_norm': 'post_attention_layernorm'},  # transformers' files
    classifier=None,
    layers={'gated_delta': delta_net_entries},
  ),
}  # fmt: skip
