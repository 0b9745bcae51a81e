"""The keys of config.json of models with short convolutions and with Mamba 2."""

import math

from paxlite.core.errors import UserError
from paxlite.core.json_text import Json, JsonObject
from paxlite.experiments.language_model import LanguageModel
from paxlite.experiments.parts.experts import MixtureOfExperts
from paxlite.experiments.parts.layers_with_state import LayersWithState
from paxlite.experiments.parts.mamba2 import Mamba2Layers
from paxlite.weights.config_keys import Both, Config, read_types, write_types
from paxlite.weights.key_values import is_on

_CONVOLUTIONS = {'conv': 'short_convolution', 'full_attention': 'full'}


def _read_lfm2_types(config: Config) -> dict[str, object]:
  attention = config.get('full_attn_idxs')
  kind = lambda i: 'full' if attention is None or i in attention else 'short_convolution'
  return {'ATTENTION_PATTERN': read_types(config, kind, _CONVOLUTIONS)}


LFM2_TYPES = Both(
  ('layer_types', 'full_attn_idxs'),
  ('ATTENTION_PATTERN',),
  _read_lfm2_types,
  lambda e: {'layer_types': write_types(e, 'full', _CONVOLUTIONS)},
)


def _read_lfm2_width(config: Config) -> dict[str, object]:
  stated = config.get('block_ff_dim')
  width = config['intermediate_size'] if stated is None else stated
  adjusts, factor = (
    is_on(config, 'block_auto_adjust_ff_dim', True),
    config.get('block_ffn_dim_multiplier', 1.0),
  )
  if adjusts:
    width = int(2 * width / 3)
    if factor is not None:
      multiple = config.get('block_multiple_of', 256)
      width = multiple * -(-int(factor * width) // multiple)
  return {'HIDDEN_DIMS': width}


# A width is stated as it is, or as that of a layer without gates, of which two thirds are taken.
LFM2_WIDTH = Both(
  (
    'intermediate_size', 'block_ff_dim', 'block_auto_adjust_ff_dim', 'block_ffn_dim_multiplier',
    'block_multiple_of',
  ),
  ('HIDDEN_DIMS',),
  _read_lfm2_width,
  lambda e: {'intermediate_size': e.HIDDEN_DIMS, 'block_auto_adjust_ff_dim': False},
)  # fmt: skip


def _tied(config: Config) -> dict[str, object]:
  name = 'tie_embedding' if 'tie_embedding' in config else 'tie_word_embeddings'
  return {'SEPARATE_EMBEDDING': not is_on(config, name, True)}


LFM2_TIED = Both(
  ('tie_word_embeddings', 'tie_embedding'),
  ('SEPARATE_EMBEDDING',),
  _tied,
  lambda e: {'tie_word_embeddings': not e.SEPARATE_EMBEDDING},
)


def _write_lfm2_bias(e: LanguageModel) -> JsonObject:
  assert isinstance(e, LayersWithState)
  if e.USE_CONVOLUTION_BIAS != e.USE_STATE_BIAS:
    raise UserError('Hugging Face has one key for USE_CONVOLUTION_BIAS and USE_STATE_BIAS')
  return {'conv_bias': e.USE_STATE_BIAS}


_BIASES = ('USE_CONVOLUTION_BIAS', 'USE_STATE_BIAS')
LFM2_BIAS = Both(
  ('conv_bias',),
  _BIASES,
  lambda config: dict.fromkeys(_BIASES, is_on(config, 'conv_bias')),
  _write_lfm2_bias,
)


# Keys and values of layer_types; the second name of a kind is that of old files, which all read.
_MAMBA = {'linear_attention': 'mamba2', 'mamba': 'mamba2'}


def _of_granite(attention: str) -> dict[str, str]:
  return _MAMBA | {'full_attention': attention, 'attention': attention}


def _read_granite_types(config: Config) -> dict[str, object]:
  attention = 'full' if config.get('position_embedding_type') == 'rope' else 'full_nope'
  types = config.get('layer_types', config.get('layers_block_type'))
  given = config if types is None else {**config, 'layer_types': types}
  return {'ATTENTION_PATTERN': read_types(given, lambda _: 'mamba2', _of_granite(attention))}


def _write_granite_types(e: LanguageModel) -> JsonObject:
  has_rope = any(kind.attention in (None, 'full') for kind in e.block_kinds)
  types = write_types(e, 'full', _of_granite('full' if has_rope else 'full_nope'))
  return {'layer_types': types, 'position_embedding_type': 'rope' if has_rope else None}


GRANITE_TYPES = Both(
  ('layer_types', 'layers_block_type', 'position_embedding_type'),
  ('ATTENTION_PATTERN',),
  _read_granite_types,
  _write_granite_types,
)


def _read_granite_experts(config: Config) -> dict[str, object]:
  shared = config['shared_intermediate_size']
  if not config['num_local_experts']:
    return {'HIDDEN_DIMS': shared, 'NUM_DENSE_BLOCKS': config['num_hidden_layers']}
  return {
    'HIDDEN_DIMS': shared,
    'SHARED_EXPERT_HIDDEN_DIMS': shared,
    'EXPERT_HIDDEN_DIMS': config['intermediate_size'],
    'NUM_EXPERTS': config['num_local_experts'],
    'NUM_EXPERTS_PER_TOKEN': config['num_experts_per_tok'],
    'NUM_DENSE_BLOCKS': 0,
  }


def _write_granite_experts(e: LanguageModel) -> JsonObject:
  assert isinstance(e, MixtureOfExperts)
  if not e.has_any_experts:
    return {
      'shared_intermediate_size': e.HIDDEN_DIMS, 'intermediate_size': e.HIDDEN_DIMS,
      'num_local_experts': 0, 'num_experts_per_tok': 0,
    }  # fmt: skip
  if not all(kind.has_experts for kind in e.block_kinds):
    raise UserError(
      f'Hugging Face has no NUM_DENSE_BLOCKS={e.NUM_DENSE_BLOCKS} beside experts in this family'
    )
  return {
    'shared_intermediate_size': e.SHARED_EXPERT_HIDDEN_DIMS,
    'intermediate_size': e.EXPERT_HIDDEN_DIMS,
    'num_local_experts': e.NUM_EXPERTS,
    'num_experts_per_tok': e.NUM_EXPERTS_PER_TOKEN,
  }


# Either all blocks have experts beside the shared one, or none has.
GRANITE_EXPERTS = Both(
  ('shared_intermediate_size', 'intermediate_size', 'num_local_experts', 'num_experts_per_tok'),
  (
    'HIDDEN_DIMS', 'SHARED_EXPERT_HIDDEN_DIMS', 'EXPERT_HIDDEN_DIMS', 'NUM_EXPERTS',
    'NUM_EXPERTS_PER_TOKEN', 'NUM_DENSE_BLOCKS',
  ),
  _read_granite_experts,
  _write_granite_experts,
)  # fmt: skip


def _read_heads(config: Config) -> dict[str, object]:
  count, width = config['mamba_n_heads'], config.get('mamba_d_head', 'auto')
  inner = config.get('mamba_expand', 2) * config['hidden_size']
  if width == 'auto':
    width = inner // count
  if count * width != inner:
    raise UserError(
      f'mamba_n_heads={count} × mamba_d_head={width} must be mamba_expand × hidden_size={inner}'
    )
  return {'MAMBA_HEADS': count, 'MAMBA_HEAD_DIMS': width}


def _write_heads(e: LanguageModel) -> JsonObject:
  assert isinstance(e, Mamba2Layers)
  count, width = e.MAMBA_HEADS, e.MAMBA_HEAD_DIMS
  if count * width % e.MODEL_DIMS:
    raise UserError(
      f'Hugging Face has no MAMBA_HEADS={count} × MAMBA_HEAD_DIMS={width} that is no multiple of '
      f'MODEL_DIMS={e.MODEL_DIMS} in this family'
    )
  expand = count * width // e.MODEL_DIMS
  return {'mamba_n_heads': count, 'mamba_d_head': width, 'mamba_expand': expand}


MAMBA_HEADS = Both(
  ('mamba_n_heads', 'mamba_d_head', 'mamba_expand'),
  ('MAMBA_HEADS', 'MAMBA_HEAD_DIMS'),
  _read_heads,
  _write_heads,
)


def _limit(value: Json) -> float:
  """Returns a limit of steps; transformers writes an infinite one as an object."""
  if isinstance(value, dict):
    value = float(value['__float__'])
  if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
    raise UserError(f'time_step_limit has {value!r}, which must be a number, and not negative')
  return float(value)


def _read_limits(config: Config) -> dict[str, object]:
  given = config.get('time_step_limit', [0.0, math.inf])
  if not isinstance(given, (list, tuple)) or len(given) != 2:
    raise UserError(f'time_step_limit={given!r} must be two numbers')
  least, most = map(_limit, given)
  if not most > 0:
    raise UserError(f'time_step_limit={given!r} leaves no steps')
  return {'MAMBA_LEAST_STEP': least, 'MAMBA_MOST_STEP': 0.0 if math.isinf(most) else most}


def _write_limits(e: LanguageModel) -> JsonObject:
  assert isinstance(e, Mamba2Layers)
  least, most = e.MAMBA_LEAST_STEP, e.MAMBA_MOST_STEP
  return {'time_step_limit': [least, most or math.inf]} if least or most else {}


STEP_LIMITS = Both(
  ('time_step_limit',),
  ('MAMBA_LEAST_STEP', 'MAMBA_MOST_STEP'),
  _read_limits,
  _write_limits,
)


_SINGLE = {'mlp': 'feed_forward', 'moe': 'experts'}
_LETTERS = {'M': 'linear_attention', 'E': 'moe', '*': 'full_attention', '-': 'mlp'}


def _read_single(config: Config) -> dict[str, object]:
  types = config.get('layers_block_type') or config.get('layer_types')
  if not types:
    letters = config['hybrid_override_pattern']
    if not set(letters) <= set(_LETTERS):
      raise UserError(f'hybrid_override_pattern={letters!r} must be of {" and ".join(_LETTERS)}')
    types = [_LETTERS[letter] for letter in letters]
  given = {'num_hidden_layers': len(types), 'layer_types': types}
  pattern = read_types(given, lambda _: '', _of_granite('full_nope') | _SINGLE)
  return {'NUM_LAYERS': len(types), 'ATTENTION_PATTERN': pattern}


def _write_single(e: LanguageModel) -> JsonObject:
  kinds = {'linear_attention': 'mamba2', 'full_attention': 'full_nope'} | _SINGLE
  types, letters = write_types(e, None, kinds), {kind: x for x, kind in _LETTERS.items()}
  return {
    'layers_block_type': types,
    'hybrid_override_pattern': ''.join(letters[kind] for kind in types),
    'num_hidden_layers': len(types),
  }


# Files have the list or the letters; transformers takes the number of layers from these.
SINGLE_BLOCKS = Both(
  ('layers_block_type', 'layer_types', 'hybrid_override_pattern', 'num_hidden_layers'),
  ('NUM_LAYERS', 'ATTENTION_PATTERN'),
  _read_single,
  _write_single,
)
