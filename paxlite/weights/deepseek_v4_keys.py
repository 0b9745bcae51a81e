"""The keys of config.json of DeepSeek-V4: kinds of layers, rotary positions and streams."""

from collections.abc import Mapping, Sequence

from paxlite.core.errors import UserError
from paxlite.core.json_text import JsonObject
from paxlite.experiments import options
from paxlite.experiments.deepseek_v4 import DeepSeekV4
from paxlite.experiments.language_model import LanguageModel
from paxlite.weights.config_keys import Both, Config, Key, OneOf, Repeated, Same
from paxlite.weights.family_keys import either, number, only, unread
from paxlite.weights.key_values import integer
from paxlite.weights.known_keys import shortened
from paxlite.weights.rope_keys import rope

_KINDS = {
  'sliding_attention': 'sliding',
  'compressed_sparse_attention': 'sparse_windows',
  'heavily_compressed_attention': 'windows',
}
_OF_RATIOS = {
  0: 'sliding_attention', 4: 'compressed_sparse_attention', 128: 'heavily_compressed_attention',
}  # fmt: skip
_RATES = {  # the former keys of the rates, the attributes, and transformers' defaults
  'compressed_sparse_attention': ('compress_rate_csa', 'SPARSE_WINDOW_RATE', 4),
  'heavily_compressed_attention': ('compress_rate_hca', 'WINDOW_RATE', 128),
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
      f'mlp_layer_types={shortened(given)} is not implemented: it must have {layers} kinds, those '
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
    raise UserError(f'partial_rotary_factor={shares[0]} of main must be that of compress')
  theta = main.pop('rope_theta', None)
  if theta is None:
    raise KeyError('rope_theta of main')
  kind = main.pop('rope_type', main.pop('type', 'default'))
  if kind != 'default' or any(value is not None for value in main.values()):
    raise UserError(f'rope_parameters: {kind} {main!r} of main is not implemented')
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
  Same('hc_mult', 'NUM_STREAMS', default=4),
  Same('hc_sinkhorn_iters', 'STREAM_ITERATIONS', default=20),
  number('hc_eps', 'STREAM_FLOOR', 1e-6),
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
