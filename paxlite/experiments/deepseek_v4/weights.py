"""How the published models of DeepSeek-V4 are stored; see weights.family."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from paxlite.core.errors import UserError
from paxlite.core.json_text import JsonObject
from paxlite.experiments import options
from paxlite.experiments.deepseek_v4 import DeepSeekV4
from paxlite.experiments.deepseek_v4.blocks import EXPERTS_OF_IDS
from paxlite.experiments.language_model import LanguageModel
from paxlite.layers.moe.group_router import LOAD_BIAS
from paxlite.weights.config_keys import Both, Config, Key, OneOf, Repeated, Same, activation
from paxlite.weights.family import Family
from paxlite.weights.family_keys import (
  EXPERTS_PER_TOKEN,
  LENGTHS,
  NO_BIAS,
  NO_MLP_BIAS,
  UNTIED,
  either,
  number,
  only,
  unread,
)
from paxlite.weights.key_values import integer
from paxlite.weights.known_keys import shortened
from paxlite.weights.layout import decoder_entries
from paxlite.weights.rope_keys import rope
from paxlite.weights.tensor_entries import Entry, head_transforms, same, transposed, whole

_KINDS = {
  'sliding_attention': 'sliding',
  'compressed_sparse_attention': 'sparse_windows',
  'heavily_compressed_attention': 'windows',
}
_OF_RATIOS = {
  0: 'sliding_attention', 4: 'compressed_sparse_attention', 128: 'heavily_compressed_attention',
}  # fmt: skip
_RATES = {  # the former keys of the rates, the attributes, and transformers' defaults
  'compressed_sparse_attention': ('compress_rate_csa', 'SPARSE_KV_COMPRESSION_RATIO', 4),
  'heavily_compressed_attention': ('compress_rate_hca', 'KV_COMPRESSION_RATIO', 128),
}


def _types(config: Config) -> list[str]:
  """Returns the kind of each layer."""
  layers = integer(config, 'num_hidden_layers')
  given, ratios = config.get('layer_types'), config.get('compress_ratios')
  if given is None and ratios is not None:
    if unknown := [r for r in ratios if r not in _OF_RATIOS]:
      raise UserError(f'compress_ratios has {unknown[0]!r}: only 0, 4 and 128 are implemented')
    given = [_OF_RATIOS[r] for r in ratios][:layers]
  if given is None:
    heavy, sparse = _OF_RATIOS[128], _OF_RATIOS[4]
    return [heavy] * min(layers, 2) + [sparse if i % 2 else heavy for i in range(layers - 2)]
  if len(given) != layers or not set(given) <= set(_KINDS):
    raise UserError(f'layer_types must have {layers} of {", ".join(_KINDS)}')
  return list(given)


def split_kinds(kinds: Sequence[str], outside: int) -> tuple[list[str], list[str]]:
  """Returns the kinds of first blocks, and the pattern that repeats behind them.

  It has as few blocks outside of repeated layers as there can be.

  Args:
    kinds: The kind of each block.
    outside: The number of first blocks that are outside for another reason.
  """

  def period(first: int) -> int:
    rest = kinds[first:]
    return next(p for p in range(1, len(rest) + 1) if rest[p:] == rest[:-p])

  first = min(range(len(kinds)), key=lambda f: (max(f, outside) + period(f), f))
  return list(kinds[:first]), list(kinds[first : first + period(first)])


def _hash_blocks(config: Config) -> int:
  layers, given = integer(config, 'num_hidden_layers'), config.get('mlp_layer_types')
  if given is None:
    return min(integer(config, 'num_hash_layers', 3), layers)
  found = given.count('hash_moe')
  if list(given) != _mlp_types(found, layers):
    raise UserError(
      f'mlp_layer_types={shortened(given)} is not supported: it must have {layers} kinds, those '
      'of hash_moe first, and then moe'
    )
  return int(found)


def _mlp_types(hashed: int, layers: int) -> list[str]:
  return ['hash_moe'] * hashed + ['moe'] * (layers - hashed)


def _read_layers(config: Config) -> dict[str, object]:
  if not integer(config, 'num_hidden_layers') > 0:
    raise UserError(f'num_hidden_layers={config["num_hidden_layers"]} must be above 0')
  hashed = _hash_blocks(config)
  first, pattern = split_kinds([_KINDS[kind] for kind in _types(config)], hashed)
  return {'NUM_HASH_BLOCKS': hashed, 'FIRST_ATTENTION': first, 'ATTENTION_PATTERN': pattern}


def _write_layers(e: LanguageModel) -> JsonObject:
  assert isinstance(e, DeepSeekV4)
  names = {ours: theirs for theirs, ours in _KINDS.items()}
  return {
    'layer_types': [names[str(kind.attention)] for kind in e.block_kinds],
    'mlp_layer_types': _mlp_types(min(e.NUM_HASH_BLOCKS, e.NUM_LAYERS), e.NUM_LAYERS),
  }


def _read_rates(config: Config) -> dict[str, object]:
  given = config.get('compress_rates') or {}
  if not isinstance(given, Mapping) or not given.keys() <= _RATES.keys():
    raise UserError(f'compress_rates={shortened(given)} must have {" and ".join(_RATES)}')
  values: dict[str, object] = {}
  for kind, (former, ours, default) in _RATES.items():
    stated = config.get(former)
    values[ours] = given.get(kind, default) if stated is None else stated
  return values


_PLAIN = rope(fraction=0.125)


def _read_rope(config: Config) -> dict[str, object]:
  """Reads the rotary positions of windows, which are also those of their queries, and of others."""
  share, rotated = config.get('partial_rotary_factor'), config.get('qk_rope_head_dim')
  if share is None:
    share = 0.125 if rotated is None else rotated / config['head_dim']
  given = dict(config.get('rope_parameters') or config.get('rope_scaling') or {})
  both = [given.pop(name, None) for name in ('main', 'compress')]
  bases = config.get('rope_theta', 10_000.0), config.get('compress_rope_theta', 160_000.0)
  if all(isinstance(part, dict) for part in both):
    main, windows = (dict(part) for part in both)
  else:
    main, windows = {}, {**given, 'rope_theta': bases[1], 'partial_rotary_factor': share}
    main |= {'rope_theta': bases[0], 'partial_rotary_factor': share}
    if windows.get('rope_type', windows.get('type')) == 'yarn':
      windows.setdefault('attention_factor', 1.0)
  shares = [part.pop('partial_rotary_factor', 1.0) for part in (main, windows)]
  if shares[0] != shares[1]:
    raise UserError(f'partial_rotary_factor={shares[0]} of main must equal that of compress')
  theta = main.pop('rope_theta', None)
  if theta is None:
    raise KeyError('rope_theta of main')
  kind = main.pop('rope_type', main.pop('type', 'default'))
  if kind != 'default' or any(value is not None for value in main.values()):
    raise UserError(f'rope_parameters: {kind} {main!r} of main is not supported')
  if isinstance(theta, bool) or not isinstance(theta, (int, float)):
    raise UserError(f'rope_theta={theta!r} of main must be a number')
  if windows.get('rope_theta') is None:
    raise KeyError('rope_theta of compress')
  others = {k: v for k, v in config.items() if k not in _PLAIN.theirs}
  stated = windows | {'partial_rotary_factor': shares[1]}
  values = _PLAIN.read(others | {'rope_parameters': stated})
  local = float(theta) if theta != values['ROPE_THETA'] else 0.0
  return values | {'ROPE_LOCAL_THETA': local, 'ROPE_STRETCHES_LOCAL': False}


def _write_rope(e: LanguageModel) -> JsonObject:
  written, local = _PLAIN.write(e), e.rotary_base(is_local=True)
  share = {'partial_rotary_factor': options.value(e, 'ROPE_FRACTION')}
  scaling = written.get('rope_scaling') or {'rope_type': 'default'}
  if scaling['rope_type'] == 'yarn':
    scaling |= {'attention_factor': e.rotary_length}  # transformers has another default
  return share | {
    'rope_theta': local,
    'compress_rope_theta': e.rotary_base(),
    'rope_parameters': {
      'main': {'rope_type': 'default', 'rope_theta': local, **share},
      'compress': {**scaling, 'rope_theta': e.rotary_base(), **share},
    },
  }


V4_KEYS: tuple[Key, ...] = (
  Same('num_attention_heads', 'NUM_HEADS'),
  Same('hidden_size', 'MODEL_DIMS'),
  Same('head_dim', 'DIMS_PER_HEAD'),
  OneOf('num_key_value_heads', 1),
  Same('q_lora_rank', 'QUERY_LATENT_DIMS'),
  Same('o_groups', 'OUTPUT_GROUPS'),
  Same('o_lora_rank', 'OUTPUT_GROUP_DIMS'),
  Same('sliding_window', 'SLIDING_WINDOW'),
  Same('index_n_heads', 'INDEXER_HEADS'),
  Same('index_head_dim', 'INDEXER_DIMS_PER_HEAD'),
  Same('index_topk', 'INDEXER_TOP_K'),
  Same('hc_mult', 'HYPER_CONNECTION_STREAMS', default=4),
  Same('hc_sinkhorn_iters', 'HYPER_CONNECTION_SINKHORN_ITERATIONS', default=20),
  number('hc_eps', 'HYPER_CONNECTION_EPSILON', 1e-6),
  number('swiglu_limit', 'SWIGLU_LIMIT', 10.0),
  Same('moe_intermediate_size', 'EXPERT_HIDDEN_DIMS'),
  Repeated('intermediate_size', 'moe_intermediate_size'),
  either('NUM_EXPERTS', 'n_routed_experts', 'num_local_experts'),
  OneOf('n_shared_experts', 1),
  OneOf('scoring_func', 'sqrtsoftplus'),
  OneOf('norm_topk_prob', True),
  only('topk_method', 'noaux_tc'),
  unread('num_nextn_predict_layers'),  # transformers computes no such modules
  Both(
    ('layer_types', 'compress_ratios', 'mlp_layer_types', 'num_hash_layers'),
    ('NUM_HASH_BLOCKS', 'FIRST_ATTENTION', 'ATTENTION_PATTERN'),
    _read_layers,
    _write_layers,
  ),
  Both(
    ('compress_rates', *(former for former, _, _ in _RATES.values())),
    tuple(ours for _, ours, _ in _RATES.values()),
    _read_rates,
    lambda e: {'compress_rates': {k: getattr(e, ours) for k, (_, ours, _) in _RATES.items()}},
  ),
  Both(
    (*_PLAIN.theirs, 'compress_rope_theta', 'qk_rope_head_dim'),
    (*_PLAIN.ours, 'ROPE_LOCAL_THETA'),
    _read_rope,
    _write_rope,
  ),
)
_LAYER = 'model.layers.{i}.'
DEEPSEEK_V4 = {
  'embedding': 'model.embed_tokens.weight', 'final_norm': 'model.norm.weight',
  'head': 'head.weight', 'merge_weights': 'model.hc_head.hc_fn',
  'merge_bias': 'model.hc_head.hc_base', 'merge_scale': 'model.hc_head.hc_scale',
  'attention_norm': _LAYER + 'attn_norm.weight', 'ffn_norm': _LAYER + 'ffn_norm.weight',
  'connection': _LAYER + 'hc_attn_', 'ff_connection': _LAYER + 'hc_ffn_',
  'query_down': _LAYER + 'attn.wq_a.weight', 'query_down_norm': _LAYER + 'attn.q_norm.weight',
  'query_up': _LAYER + 'attn.wq_b.weight', 'key': _LAYER + 'attn.wkv.weight',
  'key_norm': _LAYER + 'attn.norm.weight', 'sinks': _LAYER + 'attn.attn_sink',
  'post_groups': _LAYER + 'attn.wo_a.weight', 'post': _LAYER + 'attn.wo_b.weight',
  'window_keys': _LAYER + 'attn.compressor.', 'index_keys': _LAYER + 'attn.indexer.compressor.',
  'index_query': _LAYER + 'attn.indexer.wq_b.weight',
  'index_weights': _LAYER + 'attn.indexer.weights_proj.weight',
  'router': _LAYER + 'ffn.gate.weight', 'router_balance': _LAYER + 'ffn.gate.bias',
  'router_table': _LAYER + 'ffn.gate.tid2eid', 'expert_gate': _LAYER + 'ffn.experts.{x}.w1.weight',
  'expert_up': _LAYER + 'ffn.experts.{x}.w3.weight',
  'expert_down': _LAYER + 'ffn.experts.{x}.w2.weight',
  'shared_gate': _LAYER + 'ffn.shared_experts.w1.weight',
  'shared_up': _LAYER + 'ffn.shared_experts.w3.weight',
  'shared_down': _LAYER + 'ffn.shared_experts.w2.weight',
}  # fmt: skip


def deepseek_v4_entries(e: LanguageModel) -> list[Entry]:
  """Returns the entries of a DeepSeek-V4; see decoder_entries."""
  assert isinstance(e, DeepSeekV4)
  layers = dict.fromkeys(('sliding', 'sparse_windows', 'windows'), _attention)
  entries = decoder_entries(e, DEEPSEEK_V4, 'interleaved', layers)
  for i, (block, kind) in enumerate(zip(e.block_names, e.block_kinds, strict=True)):
    name = {role: text.replace('{i}', str(i)) for role, text in DEEPSEEK_V4.items()}
    ours = f'transformer/{block}'
    attention = f'{ours}/self_attention'
    keys, to = name['window_keys'], f'{attention}/window_keys'
    if kind.attention == 'windows':
      entries += _window_keys(e, keys, e.KV_COMPRESSION_RATIO, 1, e.DIMS_PER_HEAD, to)
    if kind.attention == 'sparse_windows':
      entries += _window_keys(e, keys, e.SPARSE_KV_COMPRESSION_RATIO, 2, e.DIMS_PER_HEAD, to)
      entries += _indexer(e, name, f'{attention}/indexer')
    for role in ('connection', 'ff_connection'):
      entries += _connection(e, name[role], f'{ours}/{role}')
    if kind.variant == 'by_ids':
      router = f'{ours}/ff_layer/experts/router'
      entries = [entry for entry in entries if entry.ours != f'{router}/{LOAD_BIAS}']
      entries.append(_table(e, name['router_table'], f'{router}/{EXPERTS_OF_IDS}'))
  N, merging = e.HYPER_CONNECTION_STREAMS, f'transformer/{e.merging_name}'
  return [
    *entries,
    _of_streams(e, DEEPSEEK_V4['merge_weights'], N, f'{merging}/weights/w'),
    same(DEEPSEEK_V4['merge_bias'], (N,), f'{merging}/b'),
    same(DEEPSEEK_V4['merge_scale'], (1,), f'{merging}/scale'),
  ]


def _attention(e: DeepSeekV4, name: Mapping[str, str], ours: str) -> list[Entry]:
  """Returns the entries that all kinds of attention have."""
  D, N, H, Q = e.MODEL_DIMS, e.NUM_HEADS, e.DIMS_PER_HEAD, e.QUERY_LATENT_DIMS
  G, R = e.OUTPUT_GROUPS, e.OUTPUT_GROUP_DIMS
  n = N // G
  return [
    transposed(name['query_down'], (Q, D), f'{ours}/query_latent/w'),
    same(name['query_down_norm'], (Q,), f'{ours}/query_latent_norm/scale'),
    _heads(name['query_up'], N, H, Q, f'{ours}/query/w'),
    transposed(name['key'], (H, D), f'{ours}/key/w'),
    same(name['key_norm'], (H,), f'{ours}/key_norm/scale'),
    same(name['sinks'], (N,), f'{ours}/dot_product/sinks/logits'),
    Entry(
      name['post_groups'], (G * R, n * H), f'{ours}/post_groups/w', (G, n, H, R),
      to_ours=lambda x: np.moveaxis(x.reshape(G, R, n, H), 1, 3),
      to_theirs=lambda w: np.moveaxis(w, 3, 1),
    ),
    Entry(
      name['post'], (D, G * R), f'{ours}/post/w', (D, G, R), to_ours=whole,
      to_theirs=lambda w: w.reshape(len(w), -1),
    ),
  ]  # fmt: skip


def _heads(theirs: str, heads: int, width: int, inputs: int, ours: str) -> Entry:
  shapes = (heads * width, inputs), (inputs, heads, width)
  return Entry(theirs, shapes[0], ours, shapes[1], *head_transforms(heads, width, None))


def _window_keys(
  e: DeepSeekV4, theirs: str, rate: int, series: int, width: int, ours: str
) -> list[Entry]:
  """Returns the entries of the keys of windows.

  Args:
    theirs: How the names of their tensors begin.
    rate: The tokens of a window.
    series: How many keys a token is a term of.
    width: The width of a key.
    ours: How the names of the variables begin.
  """
  D, values = e.MODEL_DIMS, series * width
  return [
    transposed(f'{theirs}wkv.weight', (values, D), f'{ours}/value/w'),
    transposed(f'{theirs}wgate.weight', (values, D), f'{ours}/gate/w'),
    same(f'{theirs}ape', (rate, values), f'{ours}/b'),
    same(f'{theirs}norm.weight', (width,), f'{ours}/norm/scale'),
  ]


def _indexer(e: DeepSeekV4, name: Mapping[str, str], ours: str) -> list[Entry]:
  """Returns the entries of an indexer."""
  D, Q, N, H = e.MODEL_DIMS, e.QUERY_LATENT_DIMS, e.INDEXER_HEADS, e.INDEXER_DIMS_PER_HEAD
  return [
    *_window_keys(e, name['index_keys'], e.SPARSE_KV_COMPRESSION_RATIO, 2, H, f'{ours}/keys'),
    _heads(name['index_query'], N, H, Q, f'{ours}/query/w'),
    transposed(name['index_weights'], (N, D), f'{ours}/weights/w'),
  ]


def _of_streams(e: DeepSeekV4, theirs: str, rows: int, ours: str) -> Entry:
  N, D = e.HYPER_CONNECTION_STREAMS, e.MODEL_DIMS
  to_theirs = lambda w: w.reshape(rows, N * D)
  return Entry(theirs, (rows, N * D), ours, (rows, N, D), whole, to_theirs)


def _connection(e: DeepSeekV4, theirs: str, ours: str) -> list[Entry]:
  """Returns the entries of a layer's connection to the streams."""
  M = (2 + e.HYPER_CONNECTION_STREAMS) * e.HYPER_CONNECTION_STREAMS
  return [
    _of_streams(e, f'{theirs}fn', M, f'{ours}/weights/w'),
    same(f'{theirs}base', (M,), f'{ours}/b'),
    same(f'{theirs}scale', (3,), f'{ours}/scale'),
  ]


def _table(e: DeepSeekV4, theirs: str, ours: str) -> Entry:
  """Returns the entry of the table of the experts of token ids, which are integers there."""

  def to_ours(x: np.ndarray) -> np.ndarray:
    if x.size and not 0 <= x.min() <= x.max() < e.NUM_EXPERTS:
      raise UserError(f'{theirs} has numbers of experts that are not below {e.NUM_EXPERTS}, or < 0')
    return x.astype(np.float32)

  table = same(theirs, (e.VOCAB_SIZE, e.NUM_EXPERTS_PER_TOKEN), ours)
  to_theirs = lambda w: w.astype(np.int64)
  return dataclasses.replace(table, to_ours=to_ours, to_theirs=to_theirs, dtype='int64')


FAMILIES: dict[str, Family] = {
  'deepseek_v4': Family(
    'DeepseekV4ForCausalLM', DeepSeekV4,
    (
      *(key for key in LENGTHS if 'intermediate_size' not in key.theirs), *V4_KEYS,
      EXPERTS_PER_TOKEN, UNTIED, NO_BIAS, NO_MLP_BIAS,
      Same('routed_scaling_factor', 'EXPERT_WEIGHT_SCALE'),
      activation('hidden_act', ours=('ACTIVATION_CLS', 'EXPERT_ACTIVATION_CLS')),
    ),
    DEEPSEEK_V4, rotary='interleaved', entries=deepseek_v4_entries,
  ),
}  # fmt: skip
