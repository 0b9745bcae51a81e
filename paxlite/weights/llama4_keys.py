"""The keys of config.json that Llama 4 has: kinds of layers, growing queries, and experts."""

from typing import Any

from paxlite.core.errors import UserError
from paxlite.core.json_text import JsonObject
from paxlite.experiments import options
from paxlite.experiments.language_model import LanguageModel
from paxlite.weights.config_keys import Both, Config, read_types
from paxlite.weights.key_values import interval
from paxlite.weights.known_keys import shortened

_CHUNKED, _FULL = 'chunked_attention', 'full_attention'
_KINDS = {(_CHUNKED, 1): 'chunked', (_FULL, 1): 'full', (_FULL, 0): 'full_nope'}
_NAMES = {ours: theirs for theirs, ours in _KINDS.items()}


def _read_types(config: Config) -> dict[str, object]:
  layers, every = config['num_hidden_layers'], interval(config, 'no_rope_layer_interval', 4)
  rotated = config.get('no_rope_layers') or [int((i + 1) % every != 0) for i in range(layers)]
  if len(rotated) < layers or not set(rotated) <= {0, 1}:
    raise UserError(f'no_rope_layers must have {layers} numbers, 0 or 1')
  types = config.get('layer_types')
  if types is None:
    types = [_CHUNKED if on else _FULL for on in rotated[:layers]]
  found = list(zip(types, rotated, strict=False))
  if len(types) != layers or not set(found) <= set(_KINDS):
    raise UserError(
      f'layer_types must have {layers} of {_CHUNKED}, with rotary positions, and {_FULL}'
    )
  kinds = [_KINDS[each] for each in found]
  pattern = read_types(
    {'num_hidden_layers': layers, 'layer_types': kinds}, lambda i: '', {k: k for k in _NAMES}
  )
  chunk = config.get('attention_chunk_size')
  if chunk is None and 'chunked' in pattern:
    raise UserError('attention_chunk_size is missing, and layer_types has chunked_attention')
  return {'ATTENTION_PATTERN': pattern} | ({} if chunk is None else {'CHUNK_LENGTH': chunk})


def _write_types(e: LanguageModel) -> JsonObject:
  kinds = [str(kind.attention) for kind in e.block_kinds]
  if not set(kinds) <= set(_NAMES):
    raise UserError(
      f'Hugging Face has no ATTENTION_PATTERN={e.ATTENTION_PATTERN} in this family: its blocks are '
      f'{" or ".join(_NAMES)}'
    )
  return {
    'layer_types': [_NAMES[kind][0] for kind in kinds],
    'no_rope_layers': [_NAMES[kind][1] for kind in kinds],
    'attention_chunk_size': e.values()['CHUNK_LENGTH'],
  }


LLAMA4_TYPES = Both(
  ('layer_types', 'no_rope_layers', 'no_rope_layer_interval', 'attention_chunk_size'),
  ('ATTENTION_PATTERN', 'CHUNK_LENGTH'),
  _read_types,
  _write_types,
)


def _read_growth(config: Config) -> dict[str, object]:
  length, growth = config.get('floor_scale', 8192), config.get('attn_scale', 0.1)
  tuning = config.get('attn_temperature_tuning', True)
  if tuning is not None and not isinstance(tuning, int):  # a number in some files
    raise UserError(f'attn_temperature_tuning={shortened(tuning)} must be true or false')
  return {
    'QUERY_GROWTH': float(growth) if tuning else 0.0,
    'QUERY_GROWTH_LENGTH': length,
  }


LLAMA4_GROWTH = Both(
  ('attn_temperature_tuning', 'floor_scale', 'attn_scale'),
  ('QUERY_GROWTH', 'QUERY_GROWTH_LENGTH'),
  _read_growth,
  lambda e: {
    'attn_temperature_tuning': options.value(e, 'QUERY_GROWTH') > 0,
    'attn_scale': options.value(e, 'QUERY_GROWTH'),
    'floor_scale': options.value(e, 'QUERY_GROWTH_LENGTH'),
  },
)


def _read_blocks(config: Config) -> dict[str, object]:
  layers, every = config['num_hidden_layers'], interval(config, 'interleave_moe_layer_step', 1)
  found = config.get('moe_layers')
  if found is None:
    found = list(range(every - 1, layers, every))
  if not found:
    return {'NUM_DENSE_BLOCKS': layers, 'BLOCKS_PER_LAYER': 1}
  step = found[1] - found[0] if len(found) > 1 else layers
  if step < 1 or found != list(range(found[0], layers, step)):
    raise UserError(
      f'moe_layers={found!r} is not implemented: every n-th layer up to the last ones'
    )
  return {'NUM_DENSE_BLOCKS': found[0], 'BLOCKS_PER_LAYER': step}


LLAMA4_BLOCKS = Both(
  ('moe_layers', 'interleave_moe_layer_step'),
  ('NUM_DENSE_BLOCKS', 'BLOCKS_PER_LAYER'),
  _read_blocks,
  lambda e: {'moe_layers': [i for i, kind in enumerate(e.block_kinds) if kind.has_experts]},
)


def _read_widths(config: Config) -> dict[str, object]:
  width = config['intermediate_size']
  return {
    'HIDDEN_DIMS': config['intermediate_size_mlp'],
    'EXPERT_HIDDEN_DIMS': width,
    'SHARED_EXPERT_HIDDEN_DIMS': width,
  }


def _write_widths(e: LanguageModel) -> JsonObject:
  values: Any = e.values()
  width, shared = values['EXPERT_HIDDEN_DIMS'], values['SHARED_EXPERT_HIDDEN_DIMS']
  if width != shared:
    raise UserError(
      f'Hugging Face has no SHARED_EXPERT_HIDDEN_DIMS={shared} beside EXPERT_HIDDEN_DIMS={width} '
      'in this family'
    )
  return {'intermediate_size': width, 'intermediate_size_mlp': e.HIDDEN_DIMS}


LLAMA4_WIDTHS = Both(
  ('intermediate_size', 'intermediate_size_mlp'),
  ('HIDDEN_DIMS', 'EXPERT_HIDDEN_DIMS', 'SHARED_EXPERT_HIDDEN_DIMS'),
  _read_widths,
  _write_widths,
)
