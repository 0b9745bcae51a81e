"""The keys of config.json that several families share, and the functions that make some of them."""

from typing import Any

from paxlite.core.errors import UserError
from paxlite.core.json_text import JsonObject
from paxlite.experiments import options
from paxlite.experiments.deepseek import DeepSeek
from paxlite.experiments.language_model import LanguageModel
from paxlite.experiments.parts.experts import MixtureOfExperts
from paxlite.weights.config_keys import (
  Both,
  Config,
  OneOf,
  Repeated,
  Same,
  activation,
  heads,
  positions,
  read_types,
  tied,
  window,
  write_types,
)
from paxlite.weights.key_values import integer, interval, is_on
from paxlite.weights.rope_keys import rope

_COUNTS = (
  Same('num_hidden_layers', 'NUM_LAYERS'),
  Same('intermediate_size', 'HIDDEN_DIMS'),
  Same('vocab_size', 'VOCAB_SIZE'),
  positions('max_position_embeddings'),
)
LENGTHS = (*_COUNTS, Same('rms_norm_eps', 'LAYERNORM_EPSILON'))
LAYER_NORM_LENGTHS = (*_COUNTS, Same('layer_norm_eps', 'LAYERNORM_EPSILON'))
SIZES = (*LENGTHS, heads())
GIVEN_KV = (*LENGTHS, heads('num_key_value_heads'))  # where transformers has another default
GIVEN_HEADS = (*LENGTHS, heads('num_key_value_heads', 'head_dim'))
EXPERT_SILU = activation('hidden_act', ours=('EXPERT_ACTIVATION_CLS',))
SILU = activation('hidden_act')
NO_BIAS = OneOf('attention_bias', False)
NO_MLP_BIAS = OneOf('mlp_bias', False)
UNTIED, TIED = tied(default=False), tied(default=True)
COMMON = (SILU, UNTIED, rope())
PLAIN = (*SIZES, *COMMON)
WINDOW = window()
GEMMA = (*GIVEN_HEADS, TIED, NO_BIAS, OneOf('use_bidirectional_attention', False))
GELU = activation('hidden_activation', 'hidden_act', default='gelu_pytorch_tanh')
GEMMA2 = (*GEMMA, GELU, Same('query_pre_attn_scalar', 'QUERY_PRE_ATTN_SCALAR'))
EXPERTS_PER_TOKEN = Same('num_experts_per_tok', 'NUM_EXPERTS_PER_TOKEN')
NORM_TOPK = Same('norm_topk_prob', 'NORMALIZE_EXPERT_WEIGHTS', default=False)


def either(attribute: str, *keys: str) -> Both:
  """Returns one attribute that versions of transformers write under different keys."""

  def read(config: Config) -> dict[str, object]:
    return {attribute: config[next((k for k in keys if k in config), keys[0])]}

  return Both(keys, (attribute,), read, lambda e: {keys[0]: options.value(e, attribute)})


def number(key: str, attribute: str, default: float = 1.0) -> Both:
  """Returns a number that some files have as an integer."""

  def read(config: Config) -> dict[str, object]:
    value = Same(key, attribute, default).read(config)[attribute]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
      raise UserError(f'{key}={value!r} must be a number')
    return {attribute: float(value)}

  return Both((key,), (attribute,), read, lambda e: {key: options.value(e, attribute)})


def choice(key: str, attribute: str, off: object, on: object, default: bool) -> Both:
  """Returns a key that is true or false, for one of two values of an attribute.

  Args:
    key: The key.
    attribute: The attribute.
    off: The attribute's value where the key is false.
    on: The attribute's value where the key is true.
    default: The key of files that do not have it.
  """

  def write(e: LanguageModel) -> JsonObject:
    value = options.value(e, attribute)
    if value not in (off, on):
      raise UserError(f'Hugging Face has no {attribute}={value} in this family')
    return {key: value == on}

  return Both(
    (key,), (attribute,), lambda c: {attribute: on if is_on(c, key, default) else off}, write
  )


def only(key: str, *values: object) -> Both:
  """Returns a key that older or published files have, with its implemented values; see OneOf.

  It is not written: transformers does not read it.
  """
  one_of: Any = OneOf
  return Both((key,), (), one_of(key, *values).read, lambda e: {})


def unread(*keys: str) -> Both:
  """Returns keys that change no logit here, whatever they say; they are not written."""
  return Both(keys, (), lambda config: {}, lambda e: {})


def counted(key: str, attribute: str, null: int) -> Both:
  """Returns a number that some files have as null, which transformers can compute with no more."""
  same = Same(key, attribute, null=null)
  return Both((key,), (attribute,), same.read, lambda e: {key: options.value(e, attribute)})


# Experts of which some see every token, after a few dense blocks.
ROUTED_EXPERTS = (
  EXPERTS_PER_TOKEN,
  Same('moe_intermediate_size', 'EXPERT_HIDDEN_DIMS'),
  either('NUM_EXPERTS', 'n_routed_experts', 'num_local_experts'),
  counted('n_shared_experts', 'NUM_SHARED_EXPERTS', 0),
  Same('first_k_dense_replace', 'NUM_DENSE_BLOCKS'),
  Same('routed_scaling_factor', 'EXPERT_WEIGHT_SCALE'),
  activation('hidden_act', ours=('ACTIVATION_CLS', 'EXPERT_ACTIVATION_CLS')),
)
NORMALIZED = Same('norm_topk_prob', 'NORMALIZE_EXPERT_WEIGHTS', default=True)
LATENT_ATTENTION = (
  *LENGTHS,
  Same('num_attention_heads', 'NUM_HEADS'),
  Same('hidden_size', 'MODEL_DIMS'),
  Same('kv_lora_rank', 'LATENT_DIMS'),
  Same('q_lora_rank', 'QUERY_LATENT_DIMS', null=0),
  Same('qk_nope_head_dim', 'DIMS_PER_HEAD'),
  Same('qk_rope_head_dim', 'ROTARY_DIMS_PER_HEAD'),
  Same('v_head_dim', 'VALUE_DIMS_PER_HEAD'),
  Repeated('num_key_value_heads', 'num_attention_heads', written='NUM_HEADS'),
  UNTIED,
  NO_BIAS,
)
DEEPSEEK = (
  *LATENT_ATTENTION,
  *ROUTED_EXPERTS,
  OneOf('moe_layer_freq', 1),
  Repeated('head_dim', 'qk_rope_head_dim'),
  rope(has_mscale=True),
  NO_MLP_BIAS,
)
GROUPS = (
  counted('n_group', 'NUM_EXPERT_GROUPS', 1),
  counted('topk_group', 'NUM_EXPERT_GROUPS_PER_TOKEN', 1),
)


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


def _read_exaone(config: Config) -> dict[str, object]:
  window, given = config.get('sliding_window', 4096), config.get('layer_types')
  period = config.get('sliding_window_pattern', 4)
  if given is None and (window is None or isinstance(period, str) or not period):
    raise KeyError('layer_types')
  if given is None:
    period = interval(config, 'sliding_window_pattern', 4)
  pattern = read_types(config, lambda i: 'full_nope' if (i + 1) % period == 0 else 'sliding', _NOPE)
  if window is not None:
    return {'SLIDING_WINDOW': window, 'ATTENTION_PATTERN': pattern}
  if 'sliding' in pattern:
    raise UserError('layer_types with sliding_attention needs a sliding_window')
  return {'SLIDING_WINDOW': 0, 'ATTENTION_PATTERN': []}


def _write_exaone(e: LanguageModel) -> JsonObject:
  if e.SLIDING_WINDOW:
    return {'sliding_window': e.SLIDING_WINDOW, 'layer_types': write_types(e, 'sliding', _NOPE)}
  types = write_types(e, 'full')  # all of them with rotary positions
  return {'sliding_window': None, 'layer_types': types}


_NOPE = {'sliding_attention': 'sliding', 'full_attention': 'full_nope'}
# Without a window, full attention has rotary positions; beside sliding attention, it has none.
EXAONE_LAYERS = Both(
  ('layer_types', 'sliding_window', 'sliding_window_pattern'),
  ('SLIDING_WINDOW', 'ATTENTION_PATTERN'),
  _read_exaone,
  _write_exaone,
)


def _read_ernie_blocks(config: Config) -> dict[str, object]:
  layers, every = integer(config, 'num_hidden_layers'), interval(config, 'moe_layer_interval', 1)
  first = integer(config, 'moe_layer_start_index')
  last = integer(config, 'moe_layer_end_index', -1)
  first += -(first + 1) % every
  end = last if last != -1 else layers - 1
  of_all, of_file = range(first, layers, every), range(first, min(end + 1, layers), every)
  if of_all != of_file:
    raise UserError(f'moe_layer_end_index={last} before the last of the blocks is not implemented')
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
    ('NUM_DENSE_BLOCKS', 'BLOCKS_PER_LAYER'),
    _read_ernie_blocks,
    _write_ernie_blocks,
  ),
)


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
        raise UserError(f'partial_rotary_factor={found!r} is not implemented: it must be {share}')
    others = {k: v for k, v in config.items() if k not in (*names, 'partial_rotary_factor')}
    return plain.read(others | given)

  def write(e: LanguageModel) -> JsonObject:
    assert isinstance(e, DeepSeek)
    written = plain.write(e)
    share = e.ROTARY_DIMS_PER_HEAD / (e.DIMS_PER_HEAD + e.ROTARY_DIMS_PER_HEAD)
    scaling = written['rope_scaling'] | {'partial_rotary_factor': share}
    return written | {'rope_scaling': scaling}

  return Both((*plain.theirs, 'head_dim'), plain.ours, read, write)
