"""How the published models of Kimi Linear are stored; see weights.family."""

from collections.abc import Mapping

from paxlite.core.errors import UserError
from paxlite.core.json_text import JsonObject
from paxlite.experiments.deepseek.weights import DEEPSEEK_NAMES, latent_attention_entries
from paxlite.experiments.kimi import KimiDeltaLayers, KimiLinear
from paxlite.experiments.language_model import LanguageModel
from paxlite.weights.config_keys import (
  Both,
  Config,
  OneOf,
  Repeated,
  Same,
  activation,
  read_types,
  write_types,
)
from paxlite.weights.family import Family
from paxlite.weights.family_keys import NO_BIAS, number, only, unread
from paxlite.weights.state_layout import output_entries, row_entry, vector_entry
from paxlite.weights.tensor_entries import Entry, same, transposed

KIMI_LINEAR = DEEPSEEK_NAMES | {
  'kda_query': 'model.layers.{i}.self_attn.q_proj.weight',
  'kda_key': 'model.layers.{i}.self_attn.k_proj.weight',
  'kda_value': 'model.layers.{i}.self_attn.v_proj.weight',
  'kda_query_convolution': 'model.layers.{i}.self_attn.q_conv1d.weight',
  'kda_key_convolution': 'model.layers.{i}.self_attn.k_conv1d.weight',
  'kda_value_convolution': 'model.layers.{i}.self_attn.v_conv1d.weight',
  'kda_decay_down': 'model.layers.{i}.self_attn.f_a_proj.weight',
  'kda_decay_up': 'model.layers.{i}.self_attn.f_b_proj.weight',
  'kda_gate_down': 'model.layers.{i}.self_attn.g_a_proj.weight',
  'kda_gate_up': 'model.layers.{i}.self_attn.g_b_proj.weight',
  'kda_rate': 'model.layers.{i}.self_attn.A_log',
  'kda_bias': 'model.layers.{i}.self_attn.dt_bias',
  'kda_beta': 'model.layers.{i}.self_attn.b_proj.weight',
  'kda_norm': 'model.layers.{i}.self_attn.o_norm.weight',
  'kda_post': 'model.layers.{i}.self_attn.o_proj.weight',
  'router': 'model.layers.{i}.block_sparse_moe.gate.weight',
  'router_balance': 'model.layers.{i}.block_sparse_moe.gate.e_score_correction_bias',
  'expert_gate': 'model.layers.{i}.block_sparse_moe.experts.{x}.w1.weight',
  'expert_up': 'model.layers.{i}.block_sparse_moe.experts.{x}.w3.weight',
  'expert_down': 'model.layers.{i}.block_sparse_moe.experts.{x}.w2.weight',
  'shared_gate': 'model.layers.{i}.block_sparse_moe.shared_experts.gate_proj.weight',
  'shared_up': 'model.layers.{i}.block_sparse_moe.shared_experts.up_proj.weight',
  'shared_down': 'model.layers.{i}.block_sparse_moe.shared_experts.down_proj.weight',
}
_KINDS = {'linear_attention': 'kimi_delta', 'full_attention': 'full_nope'}
_PARTS = 'linear_attn_config'
_LISTS = {'kda_layers': 'linear_attention', 'full_attn_layers': 'full_attention'}
# the keys of the dictionary of published files, those of transformers, and the attributes
_SIZES = {
  'head_dim': ('linear_head_dim', 'KDA_HEAD_DIMS', 128),
  'num_heads': ('linear_num_heads', 'KDA_HEADS', 32),
  'short_conv_kernel_size': ('linear_conv_kernel_dim', 'CONVOLUTION_WIDTH', 4),
}


def _parts(config: Config) -> Config:
  """Returns the dictionary that published files have for layers with a state."""
  parts = config.get(_PARTS) or {}
  if not isinstance(parts, dict):
    raise UserError(f'{_PARTS}={parts!r} must be an object')
  if unknown := parts.keys() - {*_SIZES, *_LISTS}:
    raise UserError(f'{_PARTS} has {min(unknown)}, which is not supported')
  return parts


def _read_layers(config: Config) -> dict[str, object]:
  parts, layers, types = _parts(config), config['num_hidden_layers'], config.get('layer_types')
  if types is None and all(name in parts for name in _LISTS):
    at = {number: kind for name, kind in _LISTS.items() for number in parts[name]}
    if sorted(at) != list(range(1, layers + 1)):
      raise UserError(f'{_PARTS} must have each of the numbers 1 to {layers} in one list')
    types = [at[i + 1] for i in range(layers)]
  given = config if types is None else {**config, 'layer_types': types}
  default = lambda i: 'full_nope' if i and i % 4 == 0 else 'kimi_delta'
  values: dict[str, object] = {'ATTENTION_PATTERN': read_types(given, default, _KINDS)}
  for name, (theirs, ours, default_size) in _SIZES.items():
    values[ours] = parts.get(name, config.get(theirs, default_size))
  return values


def _write_layers(e: LanguageModel) -> JsonObject:
  sizes = {theirs: getattr(e, ours) for theirs, ours, _ in _SIZES.values()}
  types: JsonObject = {'layer_types': write_types(e, None, _KINDS)}
  return types | sizes


KDA_LAYERS = Both(
  (_PARTS, 'layer_types', *(theirs for theirs, _, _ in _SIZES.values())),
  ('ATTENTION_PATTERN', *(ours for _, ours, _ in _SIZES.values())), _read_layers, _write_layers,
)  # fmt: skip


def _read_dense(config: Config) -> dict[str, object]:
  types, layers = config.get('mlp_layer_types'), config['num_hidden_layers']
  if types is None:
    return {'NUM_DENSE_BLOCKS': config.get('first_k_dense_replace', 1)}
  dense = sum(kind == 'dense' for kind in types)
  if [*types] != ['dense'] * dense + ['sparse'] * (layers - dense):
    raise UserError(
      f'mlp_layer_types must have {layers} of dense and sparse, first those that are dense'
    )
  return {'NUM_DENSE_BLOCKS': dense}


def _write_dense(e: LanguageModel) -> JsonObject:
  types = ['sparse' if kind.has_experts else 'dense' for kind in e.block_kinds]
  return {'mlp_layer_types': types}


DENSE_LAYERS = Both(
  ('mlp_layer_types', 'first_k_dense_replace'), ('NUM_DENSE_BLOCKS',), _read_dense, _write_dense
)


def _read_shared(config: Config) -> dict[str, object]:
  count = config.get('num_shared_experts', config.get('n_shared_experts'))
  if count is None:
    raise KeyError('num_shared_experts')
  if not count > 0:
    raise UserError(f'num_shared_experts={count!r} must be above 0')
  return {'NUM_SHARED_EXPERTS': count}


def _write_shared(e: LanguageModel) -> JsonObject:
  assert isinstance(e, KimiLinear)
  if not e.NUM_SHARED_EXPERTS:
    raise UserError('Hugging Face has no NUM_SHARED_EXPERTS=0 in this family')
  return {'num_shared_experts': e.NUM_SHARED_EXPERTS}


SHARED_EXPERTS = Both(
  ('num_shared_experts', 'n_shared_experts'), ('NUM_SHARED_EXPERTS',), _read_shared, _write_shared
)


def default_of(attribute: str, default: object, *keys: str) -> Both:
  """Returns an attribute with several keys, of which the first one is written.

  Args:
    default: Its value in files with none of the keys.
    *keys: The keys.
  """

  def read(config: Config) -> dict[str, object]:
    found = (config[key] for key in keys if config.get(key) is not None)
    return {attribute: next(found, default)}

  return Both(keys, (attribute,), read, lambda e: {keys[0]: getattr(e, attribute)})


def _read_length(config: Config) -> dict[str, object]:
  length = config.get('model_max_length', config.get('max_position_embeddings'))
  if length is None:
    raise KeyError('model_max_length')
  return dict.fromkeys(('MAX_POSITION_EMBEDDINGS', 'MAX_SEQ_LEN'), length)


MODEL_LENGTH = Both(
  ('model_max_length', 'max_position_embeddings'), ('MAX_POSITION_EMBEDDINGS', 'MAX_SEQ_LEN'),
  _read_length, lambda e: {'model_max_length': max(e.MAX_POSITION_EMBEDDINGS, e.MAX_SEQ_LEN)},
)  # fmt: skip


def kimi_delta_entries(e: KimiDeltaLayers, name: Mapping[str, str], ours: str) -> list[Entry]:
  """Returns the entries of Kimi Delta Attention; the arguments are those of delta_net_entries."""
  D, W, (N, H) = e.MODEL_DIMS, e.CONVOLUTION_WIDTH, (e.KDA_HEADS, e.KDA_HEAD_DIMS)
  whole = slice(0, N * H)

  def heads(role: str, inputs: int, shape: tuple[int, ...] = ()) -> Entry:
    made = (N * H, *shape, inputs)
    return row_entry(name[f'kda_{role}'], made, whole, f'{ours}/{role}', (N, H))

  entries = []
  for role in ('query', 'key', 'value'):
    entries += [heads(role, D), heads(f'{role}_convolution', W, (1,))]
  for role in ('decay', 'gate'):
    down = transposed(name[f'kda_{role}_down'], (H, D), f'{ours}/{role}_down/w')
    entries += [down, heads(f'{role}_up', H)]
  rate = Entry(
    name['kda_rate'], (1, 1, N, 1), f'{ours}/decay/log_rate', (N,), to_ours=lambda x: x.reshape(N),
    to_theirs=lambda w: w.reshape(1, 1, N, 1),
  )  # fmt: skip
  return [
    *entries, rate, vector_entry(name['kda_bias'], f'{ours}/decay/bias', (N, H)),
    transposed(name['kda_beta'], (N, D), f'{ours}/beta/w'),
    same(name['kda_norm'], (H,), f'{ours}/norm/scale'),
    *output_entries(name['kda_post'], f'{ours}/post', (D, N, H), has_bias=False),
  ]  # fmt: skip


FAMILIES: dict[str, Family] = {
  'kimi_linear': Family(
    'KimiLinearForCausalLM', KimiLinear,
    (
      Same('num_hidden_layers', 'NUM_LAYERS'), Same('vocab_size', 'VOCAB_SIZE'), MODEL_LENGTH,
      Same('intermediate_size', 'HIDDEN_DIMS'), Same('hidden_size', 'MODEL_DIMS'),
      Same('rms_norm_eps', 'LAYERNORM_EPSILON', default=1e-5),
      Same('num_attention_heads', 'NUM_HEADS'),
      Repeated('num_key_value_heads', 'num_attention_heads', written='NUM_HEADS'),
      Same('kv_lora_rank', 'LATENT_DIMS', default=512),
      Same('q_lora_rank', 'QUERY_LATENT_DIMS', default=0, null=0),
      Same('qk_nope_head_dim', 'DIMS_PER_HEAD', default=128),
      Same('qk_rope_head_dim', 'ROTARY_DIMS_PER_HEAD', default=64),
      Same('v_head_dim', 'VALUE_DIMS_PER_HEAD', default=128),
      OneOf('tie_word_embeddings', False), NO_BIAS, KDA_LAYERS, DENSE_LAYERS, SHARED_EXPERTS,
      activation('hidden_act', default='silu', ours=('ACTIVATION_CLS', 'EXPERT_ACTIVATION_CLS')),
      Same('moe_intermediate_size', 'EXPERT_HIDDEN_DIMS'),
      default_of('NUM_EXPERTS', 256, 'num_experts', 'num_local_experts', 'n_routed_experts'),
      default_of('NUM_EXPERTS_PER_TOKEN', 8, 'num_experts_per_token', 'num_experts_per_tok'),
      default_of('NORMALIZE_EXPERT_WEIGHTS', True, 'moe_renormalize', 'norm_topk_prob'),
      default_of('NUM_EXPERT_GROUPS', 1, 'num_expert_group', 'n_group'),
      Same('topk_group', 'NUM_EXPERT_GROUPS_PER_TOKEN', default=1),
      number('routed_scaling_factor', 'EXPERT_WEIGHT_SCALE', default=2.446),
      # in published files, which transformers does not read
      only('mla_use_nope', True), only('moe_router_activation_func', 'sigmoid'),
      only('moe_layer_freq', 1), only('use_grouped_topk', True), only('topk_method', 'noaux_tc'),
      unread('head_dim', 'rope_theta', 'rope_scaling', 'rope_parameters', 'rope_interleave'),
    ),
    KIMI_LINEAR,
    other_names={'.block_sparse_moe.': '.mlp.'},  # dense blocks in transformers' files
    classifier=None,
    layers={'kimi_delta': kimi_delta_entries},
    attention=latent_attention_entries,
  ),
}  # fmt: skip
