"""How the published models of ERNIE 4.5 are stored; see weights.family."""

from paxlite.core.errors import UserError
from paxlite.core.json_text import JsonObject
from paxlite.experiments import options
from paxlite.experiments.ernie import Ernie4_5, Ernie4_5Moe
from paxlite.experiments.language_model import LanguageModel
from paxlite.experiments.parts.experts import MixtureOfExperts
from paxlite.weights import tensor_names
from paxlite.weights.config_keys import Both, Config, OneOf, Same, activation
from paxlite.weights.family import Family
from paxlite.weights.family_keys import GIVEN_HEADS, GIVEN_KV, SILU, TIED, either, only, unread
from paxlite.weights.key_values import integer, interval, is_on
from paxlite.weights.rope_keys import rope

ERNIE_MOE = tensor_names.SHARED_EXPERTS | {
  'router_balance': 'model.layers.{i}.mlp.moe_statics.e_score_correction_bias'
}


def _read_ernie_blocks(config: Config) -> dict[str, object]:
  layers, every = integer(config, 'num_hidden_layers'), interval(config, 'moe_layer_interval', 1)
  first = integer(config, 'moe_layer_start_index')
  last = integer(config, 'moe_layer_end_index', -1)
  first += -(first + 1) % every
  end = last if last != -1 else layers - 1
  of_all, of_file = range(first, layers, every), range(first, min(end + 1, layers), every)
  if of_all != of_file:
    raise UserError(f'moe_layer_end_index={last} before the last of the blocks is not supported')
  return {'NUM_DENSE_BLOCKS': first, 'BLOCKS_PER_LAYER': every}


def _write_ernie_blocks(e: LanguageModel) -> JsonObject:
  assert isinstance(e, MixtureOfExperts)
  first, every = e.NUM_DENSE_BLOCKS, e.BLOCKS_PER_LAYER
  if (first + 1) % every:
    raise UserError(
      f'Hugging Face has no NUM_DENSE_BLOCKS={first} with BLOCKS_PER_LAYER={every} in this family'
    )
  return {
    'moe_layer_start_index': first, 'moe_layer_interval': every, 'moe_layer_end_index': -1,
  }  # fmt: skip


def _write_ernie_bias(e: LanguageModel) -> JsonObject:
  if options.value(e, 'USE_SOFTMAX_BIAS') != e.USE_BIAS:
    raise UserError('Hugging Face has one key for USE_BIAS and USE_SOFTMAX_BIAS in this family')
  return {'use_bias': e.USE_BIAS}


ERNIE_EXPERTS = (
  Both(
    ('use_bias',),
    ('USE_BIAS', 'USE_SOFTMAX_BIAS'),
    lambda c: dict.fromkeys(('USE_BIAS', 'USE_SOFTMAX_BIAS'), is_on(c, 'use_bias')),
    _write_ernie_bias,
  ),
  either('NUM_EXPERTS_PER_TOKEN', 'moe_k', 'num_experts_per_tok'),
  either('NUM_EXPERTS', 'moe_num_experts', 'num_experts'),
  Same('moe_num_shared_experts', 'NUM_SHARED_EXPERTS', default=2),
  Same('moe_intermediate_size', 'EXPERT_HIDDEN_DIMS'),
  activation('hidden_act', ours=('ACTIVATION_CLS', 'EXPERT_ACTIVATION_CLS')),
  OneOf('moe_norm_min', 1e-12),
  OneOf('moe_gate', 'topk'),
  OneOf('moe_use_aux_free', True),
  only('use_rmsnorm', True),
  unread('num_nextn_predict_layers'),
  Both(
    ('moe_layer_start_index', 'moe_layer_interval', 'moe_layer_end_index'),
    ('NUM_DENSE_BLOCKS', 'BLOCKS_PER_LAYER'), _read_ernie_blocks, _write_ernie_blocks,
  ),
)  # fmt: skip

FAMILIES: dict[str, Family] = {
  'ernie4_5': Family(
    'Ernie4_5ForCausalLM', Ernie4_5,
    (*GIVEN_HEADS, SILU, TIED, rope(theta=5e5), Same('use_bias', 'USE_BIAS', default=False)),
    rotary='interleaved',
    classifier=None,
  ),
  'ernie4_5_moe': Family(
    'Ernie4_5_MoeForCausalLM', Ernie4_5Moe,
    (*GIVEN_KV, TIED, rope(theta=5e5), *ERNIE_EXPERTS),
    ERNIE_MOE, rotary='interleaved',
    classifier=None,
  ),
}  # fmt: skip
