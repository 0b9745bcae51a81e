"""How the published models of DeepSeek and Mistral 4 are stored; see weights.family."""

from collections.abc import Mapping

from paxlite.core.errors import UserError
from paxlite.core.json_text import JsonObject
from paxlite.experiments.deepseek import DeepSeek, DeepSeekV2, DeepSeekV3, Mistral4
from paxlite.experiments.language_model import LanguageModel
from paxlite.experiments.parts.experts import MixtureOfExperts
from paxlite.weights import tensor_names
from paxlite.weights.config_keys import Both, Config, OneOf, Repeated, Same
from paxlite.weights.family import Family
from paxlite.weights.family_keys import (
  GROUPS,
  LENGTHS,
  NO_BIAS,
  NO_MLP_BIAS,
  NORMALIZED,
  ROUTED_EXPERTS,
  UNTIED,
)
from paxlite.weights.prediction_keys import PREDICTION_MODULES
from paxlite.weights.rope_keys import rope
from paxlite.weights.tensor_entries import Entry, head_transforms, same, transposed, whole

DEEPSEEK_NAMES = tensor_names.SHARED_EXPERTS | {
  'query_down': 'model.layers.{i}.self_attn.q_a_proj.weight',
  'query_down_norm': 'model.layers.{i}.self_attn.q_a_layernorm.weight',
  'query_up': 'model.layers.{i}.self_attn.q_b_proj.weight',
  'latent': 'model.layers.{i}.self_attn.kv_a_proj_with_mqa.weight',
  'latent_norm': 'model.layers.{i}.self_attn.kv_a_layernorm.weight',
  'key_value': 'model.layers.{i}.self_attn.kv_b_proj.weight',
}
# The experts of a block are one tensor, [E, out, in], in which all gates come first.
MISTRAL4 = DEEPSEEK_NAMES | {
  'expert_gate_up': 'model.layers.{i}.mlp.experts.gate_up_proj',
  'expert_down': 'model.layers.{i}.mlp.experts.down_proj',
}
DEEPSEEK_V3 = DEEPSEEK_NAMES | tensor_names.PREDICTIONS
LATENT_ATTENTION = (
  *LENGTHS, Same('num_attention_heads', 'NUM_HEADS'), Same('hidden_size', 'MODEL_DIMS'),
  Same('kv_lora_rank', 'LATENT_DIMS'), Same('q_lora_rank', 'QUERY_LATENT_DIMS', null=0),
  Same('qk_nope_head_dim', 'DIMS_PER_HEAD'), Same('qk_rope_head_dim', 'ROTARY_DIMS_PER_HEAD'),
  Same('v_head_dim', 'VALUE_DIMS_PER_HEAD'),
  Repeated('num_key_value_heads', 'num_attention_heads', written='NUM_HEADS'), UNTIED, NO_BIAS,
)  # fmt: skip
DEEPSEEK = (
  *LATENT_ATTENTION, *ROUTED_EXPERTS, OneOf('moe_layer_freq', 1),
  Repeated('head_dim', 'qk_rope_head_dim'), rope(has_mscale=True), NO_MLP_BIAS,
)  # fmt: skip


def routing(methods: tuple[str, str], scores: str) -> Both:
  """Returns the keys that say how DeepSeek chooses experts, and keys that repeat other sizes.

  Args:
    methods: The values of topk_method for one group and for several.
    scores: The value of scoring_func.
  """
  plain, grouped = methods
  names = ('n_group', 'topk_group', 'topk_method', 'scoring_func')

  def read(config: Config) -> dict[str, object]:
    OneOf('topk_method', plain, grouped).read(config)
    OneOf('scoring_func', scores).read(config)
    if config.get('topk_method', plain) != grouped:
      return {'NUM_EXPERT_GROUPS': 1, 'NUM_EXPERT_GROUPS_PER_TOKEN': 1}
    return GROUPS[0].read(config) | GROUPS[1].read(config)

  def write(e: LanguageModel) -> JsonObject:
    assert isinstance(e, MixtureOfExperts)
    method = plain if e.NUM_EXPERT_GROUPS == 1 else grouped
    groups = GROUPS[0].write(e) | GROUPS[1].write(e)
    return groups | {'topk_method': method, 'scoring_func': scores}

  ours = tuple(name for key in GROUPS for name in key.ours)
  return Both(names, ours, read, write)


def latent_rope() -> Both:
  """Returns the keys of rotary positions of Mistral 4, which repeat the rotated share of a head."""
  plain = rope(has_mscale=True, is_stretched=True, has_growth=True)

  def read(config: Config) -> dict[str, object]:
    rotated = config['qk_rope_head_dim']
    share = rotated / (config['qk_nope_head_dim'] + rotated)
    names = ('rope_scaling', 'rope_parameters')
    given = {k: dict(config[k]) for k in names if config.get(k)}
    for found in (parameters.pop('partial_rotary_factor', None) for parameters in given.values()):
      if found not in (None, share):
        raise UserError(f'partial_rotary_factor={found!r} is not supported: it must be {share}')
    others = {k: v for k, v in config.items() if k not in (*names, 'partial_rotary_factor')}
    return plain.read(others | given)

  def write(e: LanguageModel) -> JsonObject:
    assert isinstance(e, DeepSeek)
    written = plain.write(e)
    share = e.ROTARY_DIMS_PER_HEAD / (e.DIMS_PER_HEAD + e.ROTARY_DIMS_PER_HEAD)
    scaling = written['rope_scaling'] | {'partial_rotary_factor': share}
    return written | {'rope_scaling': scaling}

  return Both((*plain.theirs, 'head_dim'), plain.ours, read, write)


def latent_attention_entries(e: DeepSeek, name: Mapping[str, str], ours: str) -> list[Entry]:
  """Returns the entries of one layer of latent attention."""
  D, N, R, Q = e.MODEL_DIMS, e.NUM_HEADS, e.LATENT_DIMS, e.QUERY_LATENT_DIMS
  plain, rotated, value = e.DIMS_PER_HEAD, e.ROTARY_DIMS_PER_HEAD, e.VALUE_DIMS_PER_HEAD

  def heads(role: str, width: int, inputs: int, ours: str) -> Entry:
    return Entry(
      name[role], (N * width, inputs), ours, (inputs, N, width), *head_transforms(N, width, None)
    )

  entries = [
    transposed(name['latent'], (R + rotated, D), f'{ours}/latent/w'),
    same(name['latent_norm'], (R,), f'{ours}/latent_norm/scale'),
    heads('key_value', plain + value, R, f'{ours}/key_value/w'),
    Entry(
      name['post'], (D, N * value), f'{ours}/post/w', (D, N, value), to_ours=whole,
      to_theirs=lambda w: w.reshape(len(w), -1),
    ),
  ]  # fmt: skip
  if not Q:
    return [*entries, heads('query', plain + rotated, D, f'{ours}/query/w')]
  return [
    *entries,
    transposed(name['query_down'], (Q, D), f'{ours}/query_latent/w'),
    same(name['query_down_norm'], (Q,), f'{ours}/query_latent_norm/scale'),
    heads('query_up', plain + rotated, Q, f'{ours}/query/w'),
  ]


# Other names of a family in published files, which transformers may not know.
OTHER_TYPES = {'kimi_k2': 'deepseek_v3'}
TEXT_DEFAULTS: dict[str, JsonObject] = {'kimi_k25': dict(model_type='deepseek_v3')}

FAMILIES: dict[str, Family] = {
  'deepseek_v2': Family(
    'DeepseekV2ForCausalLM', DeepSeekV2,
    (
      *DEEPSEEK, OneOf('norm_topk_prob', False),
      routing(('greedy', 'group_limited_greedy'), 'softmax'),
    ),
    DEEPSEEK_NAMES, rotary='interleaved', attention=latent_attention_entries,
  ),
  'deepseek_v3': Family(
    'DeepseekV3ForCausalLM', DeepSeekV3,
    (
      *DEEPSEEK, OneOf('rope_interleave', True), routing(('noaux_tc', 'noaux_tc'), 'sigmoid'),
      NORMALIZED, PREDICTION_MODULES,
    ),
    DEEPSEEK_V3, rotary='interleaved', attention=latent_attention_entries,
  ),
  'mistral4': Family(
    'Mistral4ForCausalLM', Mistral4,
    (
      *LATENT_ATTENTION, *ROUTED_EXPERTS, *GROUPS, NORMALIZED, latent_rope(),
      OneOf('rope_interleave', True),
    ),
    MISTRAL4, rotary='interleaved', attention=latent_attention_entries,
  ),
}  # fmt: skip
