"""How the published models of Gemma 4 are stored; see weights.family."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from paxlite.core.errors import UserError
from paxlite.core.json_text import JsonObject
from paxlite.experiments.gemma4 import Gemma4, WideAttention
from paxlite.experiments.gemma4.layers import FIXED
from paxlite.experiments.language_model import LanguageModel
from paxlite.weights import tensor_names
from paxlite.weights.config_keys import (
  Both,
  Cap,
  Config,
  OneOf,
  activation,
  read_types,
  write_types,
)
from paxlite.weights.family import Family
from paxlite.weights.family_keys import GIVEN_HEADS, NO_BIAS, TIED
from paxlite.weights.key_values import is_on
from paxlite.weights.layout import attention_entries, decoder_entries
from paxlite.weights.rope_keys import rope
from paxlite.weights.tensor_entries import Entry, same, transposed

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
    raise UserError('Hugging Face has no Gemma 4 with sliding attention in the last block')
  return {'layer_types': types, 'sliding_window': e.SLIDING_WINDOW}


GEMMA4_TYPES = Both(
  ('layer_types', 'sliding_window'), ('SLIDING_WINDOW', 'ATTENTION_PATTERN'),
  lambda c: {'SLIDING_WINDOW': c['sliding_window'], 'ATTENTION_PATTERN': _pattern(c)}, _write_types,
)  # fmt: skip


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
    raise UserError(f'{unknown[0]} of per_layer_config is not supported')
  if others:
    raise UserError(
      f'per_layer_config of layer {others[0]} is not supported: all of {_FULL} must be alike, '
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
      f'Hugging Face has no FULL_KV_HEADS={heads} with NUM_KV_HEADS={e.NUM_KV_HEADS} in this '
      'family without KEYS_ARE_VALUES=True'
    )
  return {
    'global_head_dim': values['FULL_DIMS_PER_HEAD'],
    'num_global_key_value_heads': heads if is_shared else None,
    'attention_k_eq_v': is_shared,
  }


GEMMA4_WIDTHS = Both(
  ('global_head_dim', 'num_global_key_value_heads', 'per_layer_config', 'attention_k_eq_v'),
  ('FULL_DIMS_PER_HEAD', 'FULL_KV_HEADS', 'KEYS_ARE_VALUES'), _read_widths, _write_widths,
)  # fmt: skip
_STRETCHED = rope(theta=1e6, local_theta=1e4)


def _read_rope(config: Config) -> dict[str, object]:
  given = dict(config.get('rope_parameters') or _ROPE)
  full, share = dict(given.get(_FULL) or {}), 1.0
  if full.get('rope_type') == 'proportional':
    share = full.pop('partial_rotary_factor', 1.0)
    if not isinstance(share, (int, float)) or not 0 < share <= 1:
      raise UserError(f'partial_rotary_factor={share!r} must be above 0 and at most 1')
    if full.pop('factor', 1.0) != 1:
      raise UserError('a factor of rope_type proportional is not supported')
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
  ('enable_moe_block', *_EXPERTS), ('NUM_DENSE_BLOCKS', *_EXPERTS.values()), _read_experts,
  _write_experts,
)  # fmt: skip


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
    'PER_LAYER_EMBEDDING_DIMS': inputs,
    'PER_LAYER_EMBEDDING_VOCAB_SIZE': vocab if inputs else config['vocab_size'],
    'NUM_KV_SHARED_LAYERS': readers,
    'KV_SHARED_HIDDEN_DIMS': width * (1 + doubles),
  }


def _write_small(e: LanguageModel) -> JsonObject:
  values: Any = e.values()
  readers, hidden = values['NUM_KV_SHARED_LAYERS'], values['KV_SHARED_HIDDEN_DIMS']
  doubles = bool(readers and hidden == 2 * e.HIDDEN_DIMS)
  if readers and not doubles and hidden != e.HIDDEN_DIMS:
    raise UserError(
      f'Hugging Face has no KV_SHARED_HIDDEN_DIMS={hidden} in this family other than '
      f'HIDDEN_DIMS={e.HIDDEN_DIMS} or twice that'
    )
  return {
    'hidden_size_per_layer_input': values['PER_LAYER_EMBEDDING_DIMS'],
    'vocab_size_per_layer_input': values['PER_LAYER_EMBEDDING_VOCAB_SIZE'],
    'num_kv_shared_layers': readers,
    'use_double_wide_mlp': doubles,
  }


GEMMA4_SMALL = Both(
  (
    'hidden_size_per_layer_input', 'vocab_size_per_layer_input', 'num_kv_shared_layers',
    'use_double_wide_mlp',
  ),
  (
    'PER_LAYER_EMBEDDING_DIMS',
    'PER_LAYER_EMBEDDING_VOCAB_SIZE',
    'NUM_KV_SHARED_LAYERS',
    'KV_SHARED_HIDDEN_DIMS',
  ),
  _read_small,
  _write_small,
)  # fmt: skip
_LAYER = 'model.layers.{i}.'
GEMMA4 = tensor_names.GEMMA2 | {
  'shared_gate': tensor_names.GEMMA2['gate'], 'shared_up': tensor_names.GEMMA2['up'],
  'shared_down': tensor_names.GEMMA2['down'], 'router': _LAYER + 'router.proj.weight',
  'expert_gate_up': _LAYER + 'experts.gate_up_proj', 'expert_down': _LAYER + 'experts.down_proj',
  'router_scale': _LAYER + 'router.scale',
  'router_expert_scale': _LAYER + 'router.per_expert_scale',
  'experts_norm': _LAYER + 'pre_feedforward_layernorm_2.weight',
  'shared_post_norm': _LAYER + 'post_feedforward_layernorm_1.weight',
  'experts_post_norm': _LAYER + 'post_feedforward_layernorm_2.weight',
  'factor': _LAYER + 'layer_scalar', 'inputs': 'model.embed_tokens_per_layer.weight',
  'inputs_projection': 'model.per_layer_model_projection.weight',
  'inputs_norm': 'model.per_layer_projection_norm.weight',
  'input_gate': _LAYER + 'per_layer_input_gate.weight',
  'input_projection': _LAYER + 'per_layer_projection.weight',
  'input_norm': _LAYER + 'post_per_layer_input_norm.weight',
}  # fmt: skip


def gemma4_entries(e: LanguageModel, names: Mapping[str, str] = GEMMA4) -> list[Entry]:
  """Returns the entries of a Gemma 4; see decoder_entries."""
  assert isinstance(e, Gemma4)
  blocks = [*zip(e.block_names, e.block_kinds, strict=True)]
  shared = [f'transformer/{name}/self_attention' for name, kind in blocks if e.is_kv_shared(kind)]
  decoder = decoder_entries(e, names, 'half', {'full': _full_attention})
  entries = _with_queries_alone(shared, decoder)
  D, P, L = e.MODEL_DIMS, e.PER_LAYER_EMBEDDING_DIMS, e.NUM_LAYERS
  if P:
    rows, table, projection = e.PER_LAYER_EMBEDDING_VOCAB_SIZE, (L * P, D), (D, L, P)
    entries += [
      same(names['inputs'], (rows, L * P), 'layer_inputs/table/emb_var'),
      Entry(
        names['inputs_projection'],
        table,
        'layer_inputs/projection/w',
        projection,
        to_ours=lambda x: x.T,
        to_theirs=lambda w: w.reshape(D, L * P).T,
      ),
      same(names['inputs_norm'], (P,), 'layer_inputs/norm/scale'),
    ]
  for i, (block, kind) in enumerate(blocks):
    name = {role: text.replace('{i}', str(i)) for role, text in names.items()}
    entries += _beside_decoder(e, name, f'transformer/{block}', kind.has_experts)
  return entries


def _beside_decoder(
  e: Gemma4, name: Mapping[str, str], ours: str, has_experts: bool
) -> list[Entry]:
  """Returns the entries of a block beside those that blocks of other decoders have."""
  D, P, E = e.MODEL_DIMS, e.PER_LAYER_EMBEDDING_DIMS, e.NUM_EXPERTS
  entries = [same(name['factor'], (1,), f'{ours}/{FIXED}')]
  if P:
    gate = f'{ours}/layer_input'
    entries += [
      transposed(name['input_gate'], (P, D), f'{gate}/gate/w'),
      transposed(name['input_projection'], (D, P), f'{gate}/projection/w'),
      same(name['input_norm'], (D,), f'{gate}/norm/scale'),
    ]
  if has_experts:
    layer = f'{ours}/ff_layer'
    entries += [
      same(name['router_scale'], (D,), f'{layer}/experts/router/scale'),
      same(name['router_expert_scale'], (E,), f'{layer}/experts/router/expert_scale'),
      same(name['experts_norm'], (D,), f'{layer}/experts/norm/scale'),
      same(name['shared_post_norm'], (D,), f'{layer}/shared_norm/scale'),
      same(name['experts_post_norm'], (D,), f'{layer}/experts_norm/scale'),
    ]
  return entries


def unread_by_gemma4(e: LanguageModel) -> str:
  """Returns a regular expression for tensors that published files have and no block reads.

  They are the projections and norms of keys and values of blocks that read those of others.
  """
  assert isinstance(e, Gemma4)
  readers = '|'.join(str(i) for i, kind in enumerate(e.block_kinds) if e.is_kv_shared(kind))
  return rf'model\.layers\.({readers})\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.\w+'


def _with_queries_alone(layers: Sequence[str], entries: Sequence[Entry]) -> list[Entry]:
  """Returns entries without those of keys and values in some layers of attention."""
  found = []
  for entry in entries:
    layer = next((layer for layer in layers if entry.ours.startswith(f'{layer}/')), None)
    if layer is not None:
      if entry.part == 0:  # queries, keys and values have one variable elsewhere
        entry = dataclasses.replace(
          entry, ours=f'{layer}/qkv/query/w', our_shape=entry.our_shape[1:], part=None
        )
      if entry.part is not None or entry.ours.startswith(
        tuple(f'{layer}/{of_keys}' for of_keys in ('qkv/key/', 'qkv/value/', 'key_norm/'))
      ):
        continue
    found.append(entry)
  return found


def _full_attention(e: WideAttention, name: Mapping[str, str], ours: str) -> list[Entry]:
  """Returns the entries of full attention, which may have no tensor of values."""
  entries = attention_entries(e.of_full_attention, name, ours, swap=False)
  if not e.KEYS_ARE_VALUES:
    return entries
  found = []
  roles = {name['query']: 'query', name['key']: 'key'}
  for entry in entries:
    if entry.theirs == name['value']:
      continue
    if entry.part is not None:  # queries and keys have a variable each, without values
      role = roles[entry.theirs]
      entry = dataclasses.replace(
        entry, ours=f'{ours}/qkv/{role}/w', our_shape=entry.our_shape[1:], part=None
      )
    found.append(entry)
  return found


# What text_config of models with images leaves out, because these are transformers' defaults.
GEMMA4_DEFAULTS: JsonObject = dict(
  model_type='gemma4_text', vocab_size=262_144, hidden_size=2304, intermediate_size=9216,
  num_hidden_layers=30, num_attention_heads=8, num_key_value_heads=4, head_dim=256,
  max_position_embeddings=131_072, rms_norm_eps=1e-6, sliding_window=512,
)  # fmt: skip
TEXT_DEFAULTS = {'gemma4': GEMMA4_DEFAULTS}

FAMILIES: dict[str, Family] = {
  'gemma4_text': Family(
    'Gemma4ForCausalLM', Gemma4,
    (
      *GIVEN_HEADS, TIED, NO_BIAS, GEMMA4_TYPES, GEMMA4_WIDTHS, GEMMA4_ROPE, GEMMA4_EXPERTS,
      GEMMA4_SMALL,
      activation(
        'hidden_activation', default='gelu_pytorch_tanh',
        ours=('ACTIVATION_CLS', 'EXPERT_ACTIVATION_CLS'),
      ),
      Cap('final_logit_softcapping', 'SOFTMAX_CAP_LOGITS', is_required=False),
      # tokens of images, which see each other there, are not in a text
      OneOf('use_bidirectional_attention', None, False, 'vision'),
    ),
    GEMMA4,
    entries=gemma4_entries,
    unread=unread_by_gemma4,
    classifier=None,
  ),
}  # fmt: skip
