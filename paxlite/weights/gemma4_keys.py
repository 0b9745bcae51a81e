"""The keys of config.json that Gemma 4 has, beside those that most families have."""

from typing import Any

from paxlite.core.errors import UserError
from paxlite.core.json_text import JsonObject
from paxlite.experiments.language_model import LanguageModel
from paxlite.weights.config_keys import Both, Config, read_types, write_types
from paxlite.weights.key_values import is_on
from paxlite.weights.rope_keys import rope

_FULL, _SLIDING = 'full_attention', 'sliding_attention'
# as transformers has them
_ROPE = {
  _SLIDING: {'rope_type': 'default', 'rope_theta': 10_000.0},
  _FULL: {'rope_type': 'proportional', 'rope_theta': 1_000_000.0, 'partial_rotary_factor': 0.25},
}
_PERIOD, _FULL_WIDTH, _PER_LAYER_WIDTH, _VOCABULARY = 6, 512, 256, 262_144


def _pattern(config: Config) -> list[str]:
  """Returns ATTENTION_PATTERN; the last block has full attention, whatever a file says of it."""
  given, layers = config.get('layer_types'), config['num_hidden_layers']
  if given is None:
    given = [_SLIDING if (i + 1) % _PERIOD else _FULL for i in range(layers)]
  if given and given[-1] == _SLIDING:
    given = [*given[:-1], _FULL]
  return read_types({**config, 'layer_types': given}, lambda i: 'full')


def _write_types(e: LanguageModel) -> JsonObject:
  types = write_types(e)
  if types[-1] != _FULL:
    raise UserError('Hugging Face has no Gemma 4 whose last block has sliding attention')
  return {'layer_types': types, 'sliding_window': e.SLIDING_WINDOW}


GEMMA4_TYPES = Both(
  ('layer_types', 'sliding_window'),
  ('SLIDING_WINDOW', 'ATTENTION_PATTERN'),
  lambda c: {'SLIDING_WINDOW': c['sliding_window'], 'ATTENTION_PATTERN': _pattern(c)},
  _write_types,
)


def _overrides(config: Config) -> JsonObject:
  """Returns what per_layer_config says of all blocks with full attention, or what stands for it."""
  given, pattern = config.get('per_layer_config'), _pattern(config)
  if given is None:
    heads = config.get('num_global_key_value_heads') if is_on(config, 'attention_k_eq_v') else None
    found = {'head_dim': config.get('global_head_dim', _FULL_WIDTH)}
    return found | ({} if heads is None else {'num_key_value_heads': heads})
  by_block = {int(i): dict(found) for i, found in given.items() if found}
  full = [i for i in range(config['num_hidden_layers']) if pattern[i % len(pattern)] == 'full']
  first: JsonObject = by_block.get(full[0], {})
  others = [i for i in by_block if i not in full or by_block[i] != first]
  others += [i for i in full if by_block.get(i, {}) != first]
  if unknown := [name for name in first if name not in ('head_dim', 'num_key_value_heads')]:
    raise UserError(f'{unknown[0]} of per_layer_config is not implemented')
  if others:
    raise UserError(
      f'per_layer_config of layer {others[0]} is not implemented: all of {_FULL} must be alike, '
      f'and {_SLIDING} must have none'
    )
  return first


def _read_widths(config: Config) -> dict[str, object]:
  found = _overrides(config)
  groups = config.get('num_key_value_heads')
  return {
    'FULL_DIMS_PER_HEAD': found.get('head_dim', config['head_dim']),
    'FULL_KV_HEADS': found.get('num_key_value_heads', groups),
    'KEYS_ARE_VALUES': is_on(config, 'attention_k_eq_v'),
  }


def _write_widths(e: LanguageModel) -> JsonObject:
  values: Any = e.values()
  heads, is_shared = values['FULL_KV_HEADS'], values['KEYS_ARE_VALUES']
  if heads != e.NUM_KV_HEADS and not is_shared:
    raise UserError(
      f'Hugging Face has no FULL_KV_HEADS={heads} beside NUM_KV_HEADS={e.NUM_KV_HEADS} in this '
      'family without KEYS_ARE_VALUES=True'
    )
  return {
    'global_head_dim': values['FULL_DIMS_PER_HEAD'],
    'num_global_key_value_heads': heads if is_shared else None,
    'attention_k_eq_v': is_shared,
  }


GEMMA4_WIDTHS = Both(
  ('global_head_dim', 'num_global_key_value_heads', 'per_layer_config', 'attention_k_eq_v'),
  ('FULL_DIMS_PER_HEAD', 'FULL_KV_HEADS', 'KEYS_ARE_VALUES'),
  _read_widths,
  _write_widths,
)

_STRETCHED = rope(theta=1e6, local_theta=1e4)


def _read_rope(config: Config) -> dict[str, object]:
  given = dict(config.get('rope_parameters') or _ROPE)
  full, share = dict(given.get(_FULL) or {}), 1.0
  if full.get('rope_type') == 'proportional':
    share = full.pop('partial_rotary_factor', 1.0)
    if not isinstance(share, (int, float)) or not 0 < share <= 1:
      raise UserError(f'partial_rotary_factor={share!r} must be above 0 and at most 1')
    if full.pop('factor', 1.0) != 1:
      raise UserError('a factor of rope_type proportional is not implemented')
    full['rope_type'] = 'default'
  values = _STRETCHED.read({**config, 'rope_parameters': given | {_FULL: full}})
  return values | {'FULL_ROPE_SHARE': float(share)}


def _write_rope(e: LanguageModel) -> JsonObject:
  written: JsonObject = _STRETCHED.write(e)['rope_parameters']
  share = e.values()['FULL_ROPE_SHARE']
  if share != 1:
    written[_FULL] |= {'rope_type': 'proportional', 'partial_rotary_factor': share}
  return {'rope_parameters': written}


GEMMA4_ROPE = Both(
  ('rope_parameters',), (*_STRETCHED.ours, 'FULL_ROPE_SHARE'), _read_rope, _write_rope
)

_EXPERTS = {
  'num_experts': 'NUM_EXPERTS',
  'top_k_experts': 'NUM_EXPERTS_PER_TOKEN',
  'moe_intermediate_size': 'EXPERT_HIDDEN_DIMS',
}


def _read_experts(config: Config) -> dict[str, object]:
  if not is_on(config, 'enable_moe_block'):
    return {'NUM_DENSE_BLOCKS': config['num_hidden_layers']}
  return {'NUM_DENSE_BLOCKS': 0} | {ours: config[name] for name, ours in _EXPERTS.items()}


def _write_experts(e: LanguageModel) -> JsonObject:
  values = e.values()
  if not e.has_any_experts:
    return {'enable_moe_block': False}
  return {'enable_moe_block': True} | {name: values[ours] for name, ours in _EXPERTS.items()}


GEMMA4_EXPERTS = Both(
  ('enable_moe_block', *_EXPERTS),
  ('NUM_DENSE_BLOCKS', *_EXPERTS.values()),
  _read_experts,
  _write_experts,
)


def _read_small(config: Config) -> dict[str, object]:
  readers, width = config.get('num_kv_shared_layers') or 0, config['intermediate_size']
  if not 0 <= readers < config['num_hidden_layers']:
    raise UserError(
      f'num_kv_shared_layers={readers} must leave some of num_hidden_layers='
      f'{config["num_hidden_layers"]} that have keys'
    )
  doubles = is_on(config, 'use_double_wide_mlp') and readers > 0
  vocab = config.get('vocab_size_per_layer_input', _VOCABULARY)
  inputs = config.get('hidden_size_per_layer_input', _PER_LAYER_WIDTH) or 0
  return {
    'LAYER_INPUT_DIMS': inputs,
    'LAYER_INPUT_VOCAB_SIZE': vocab if inputs else config['vocab_size'],
    'NUM_KEY_READERS': readers,
    'READER_HIDDEN_DIMS': width * (1 + doubles),
  }


def _write_small(e: LanguageModel) -> JsonObject:
  values: Any = e.values()
  readers, hidden = values['NUM_KEY_READERS'], values['READER_HIDDEN_DIMS']
  doubles = bool(readers and hidden == 2 * e.HIDDEN_DIMS)
  if readers and not doubles and hidden != e.HIDDEN_DIMS:
    raise UserError(
      f'Hugging Face has no READER_HIDDEN_DIMS={hidden} in this family other than '
      f'HIDDEN_DIMS={e.HIDDEN_DIMS} or twice that'
    )
  return {
    'hidden_size_per_layer_input': values['LAYER_INPUT_DIMS'],
    'vocab_size_per_layer_input': values['LAYER_INPUT_VOCAB_SIZE'],
    'num_kv_shared_layers': readers,
    'use_double_wide_mlp': doubles,
  }


GEMMA4_SMALL = Both(
  (
    'hidden_size_per_layer_input', 'vocab_size_per_layer_input', 'num_kv_shared_layers',
    'use_double_wide_mlp',
  ),
  ('LAYER_INPUT_DIMS', 'LAYER_INPUT_VOCAB_SIZE', 'NUM_KEY_READERS', 'READER_HIDDEN_DIMS'),
  _read_small,
  _write_small,
)  # fmt: skip
