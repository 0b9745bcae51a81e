"""How the published models of Llama 4 are stored; see weights.family."""

import dataclasses
from typing import Any

from paxlite.core.errors import UserError
from paxlite.core.json_text import JsonObject
from paxlite.experiments import options
from paxlite.experiments.language_model import LanguageModel
from paxlite.experiments.llama4 import Llama4
from paxlite.weights import tensor_names
from paxlite.weights.config_keys import Both, Config, Same, activation, read_types
from paxlite.weights.family import Family
from paxlite.weights.family_keys import EXPERTS_PER_TOKEN, GIVEN_HEADS, UNTIED, unread
from paxlite.weights.key_values import interval
from paxlite.weights.known_keys import shortened
from paxlite.weights.layout import decoder_entries
from paxlite.weights.rope_keys import rope
from paxlite.weights.tensor_entries import Entry, whole

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
  ('ATTENTION_PATTERN', 'CHUNK_LENGTH'), _read_types, _write_types,
)  # fmt: skip


def _read_growth(config: Config) -> dict[str, object]:
  length, growth = config.get('floor_scale', 8192), config.get('attn_scale', 0.1)
  tuning = config.get('attn_temperature_tuning', True)
  if tuning is not None and not isinstance(tuning, int):  # a number in some files
    raise UserError(f'attn_temperature_tuning={shortened(tuning)} must be true or false')
  return {
    'ATTENTION_TEMPERATURE_SCALE': float(growth) if tuning else 0.0,
    'ATTENTION_TEMPERATURE_FLOOR': length,
  }


LLAMA4_GROWTH = Both(
  ('attn_temperature_tuning', 'floor_scale', 'attn_scale'),
  ('ATTENTION_TEMPERATURE_SCALE', 'ATTENTION_TEMPERATURE_FLOOR'),
  _read_growth,
  lambda e: {
    'attn_temperature_tuning': options.value(e, 'ATTENTION_TEMPERATURE_SCALE') > 0,
    'attn_scale': options.value(e, 'ATTENTION_TEMPERATURE_SCALE'),
    'floor_scale': options.value(e, 'ATTENTION_TEMPERATURE_FLOOR'),
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
    raise UserError(f'moe_layers={found!r} is not supported: every n-th layer up to the last ones')
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
      f'Hugging Face has no SHARED_EXPERT_HIDDEN_DIMS={shared} with EXPERT_HIDDEN_DIMS={width} in '
      'this family'
    )
  return {'intermediate_size': width, 'intermediate_size_mlp': e.HIDDEN_DIMS}


LLAMA4_WIDTHS = Both(
  ('intermediate_size', 'intermediate_size_mlp'),
  ('HIDDEN_DIMS', 'EXPERT_HIDDEN_DIMS', 'SHARED_EXPERT_HIDDEN_DIMS'), _read_widths, _write_widths,
)  # fmt: skip
_FEED_FORWARD = 'model.layers.{i}.feed_forward.'
_LLAMA4 = tensor_names.HUGGING_FACE | {
  'gate': _FEED_FORWARD + 'gate_proj.weight',
  'up': _FEED_FORWARD + 'up_proj.weight',
  'down': _FEED_FORWARD + 'down_proj.weight',
  'shared_gate': _FEED_FORWARD + 'shared_expert.gate_proj.weight',
  'shared_up': _FEED_FORWARD + 'shared_expert.up_proj.weight',
  'shared_down': _FEED_FORWARD + 'shared_expert.down_proj.weight',
  'router': _FEED_FORWARD + 'router.weight',
  'expert_gate_up': _FEED_FORWARD + 'experts.gate_up_proj',
  'expert_down': _FEED_FORWARD + 'experts.down_proj',
}


def llama4_entries(e: LanguageModel) -> list[Entry]:
  """Returns the entries of a Llama 4, whose experts are [E, in, out], as the variables are."""
  found = []
  for entry in decoder_entries(e, _LLAMA4, 'interleaved'):
    if entry.theirs.endswith('experts.gate_up_proj'):
      E, D, F = entry.our_shape
      halves = slice(0, F) if entry.ours.endswith('w_in_gate') else slice(F, 2 * F)
      view = lambda x, halves=halves: x[..., halves]
      entry = dataclasses.replace(
        entry, shape=(E, D, 2 * F), to_ours=whole, to_theirs=whole, view=view
      )
    elif entry.theirs.endswith('experts.down_proj'):
      entry = dataclasses.replace(entry, shape=entry.our_shape, to_ours=whole, to_theirs=whole)
    found.append(entry)
  return found


# What text_config of models with images leaves out, because these are transformers' defaults.
LLAMA4_DEFAULTS: JsonObject = dict(
  model_type='llama4_text', vocab_size=202_048, hidden_size=5120, intermediate_size=8192,
  intermediate_size_mlp=16_384, num_hidden_layers=48, num_attention_heads=40,
  num_key_value_heads=8, head_dim=128, hidden_act='silu', max_position_embeddings=131_072,
  rms_norm_eps=1e-5, num_experts_per_tok=1, num_local_experts=16, attention_chunk_size=8192,
)  # fmt: skip
TEXT_DEFAULTS = {'llama4': LLAMA4_DEFAULTS}

FAMILIES: dict[str, Family] = {
  'llama4_text': Family(
    'Llama4ForCausalLM', Llama4,
    (
      *(key for key in GIVEN_HEADS if 'intermediate_size' not in key.theirs), UNTIED,
      rope(theta=5e5), LLAMA4_TYPES, LLAMA4_GROWTH, LLAMA4_BLOCKS, LLAMA4_WIDTHS,
      EXPERTS_PER_TOKEN,
      activation('hidden_act', ours=('ACTIVATION_CLS', 'EXPERT_ACTIVATION_CLS')),
      Same('num_local_experts', 'NUM_EXPERTS'),
      Same('use_qk_norm', 'USE_UNSCALED_QK_NORM', default=True),
      Same('attention_bias', 'USE_BIAS', default=False), unread('for_llm_compression'),
    ),
    _LLAMA4, rotary='interleaved',
    entries=llama4_entries,
    classifier=None,
  ),
}  # fmt: skip
