"""The keys of a Hugging Face config.json about rotary positions, in old and new files."""

import math

from paxlite.core.errors import UserError
from paxlite.core.json_text import JsonObject
from paxlite.experiments.language_model import LanguageModel
from paxlite.weights.config_keys import Both, Config

# Keys by rope_type, with their attributes.
_COMMON = {'factor': 'ROPE_FACTOR', 'original_max_position_embeddings': 'ROPE_ORIGINAL_LENGTH'}
_KEYS = {
  'linear': {'factor': 'ROPE_FACTOR'},
  'llama3': _COMMON
  | {
    'low_freq_factor': 'ROPE_LOW_FREQUENCY_FACTOR',
    'high_freq_factor': 'ROPE_HIGH_FREQUENCY_FACTOR',
  },
  'yarn': _COMMON
  | {
    'beta_fast': 'ROPE_FAST_TURNS',
    'beta_slow': 'ROPE_SLOW_TURNS',
    'truncate': 'ROPE_WHOLE_PAIRS',
    'attention_factor': 'ROPE_ATTENTION_FACTOR',
  },
  'longrope': _COMMON
  | {
    'short_factor': 'ROPE_SHORT_FACTORS',
    'long_factor': 'ROPE_LONG_FACTORS',
    'attention_factor': 'ROPE_ATTENTION_FACTOR',
  },
}
# Keys of every rope_type, and keys that repeat what other keys say.
_OTHERS = {'rope_type', 'type', 'rope_theta', 'partial_rotary_factor', 'max_position_embeddings'}
_MSCALE = {'mscale': 'ROPE_MSCALE', 'mscale_all_dim': 'ROPE_MSCALE_ALL_DIM'}
_USUAL = ('ROPE_FACTOR', 'ROPE_SCALING', 'ROPE_ORIGINAL_LENGTH')  # give the usual factor
_NAMES = ('rope_theta', 'rope_scaling', 'rope_parameters', 'partial_rotary_factor')
_OURS = ('ROPE_THETA', 'ROPE_FACTOR', 'ROPE_SCALING', 'ROPE_ORIGINAL_LENGTH', 'MAX_SEQ_LEN')


def _read_one(rope: Config, config: Config, has_mscale: bool, default_theta: float) -> JsonObject:
  """Returns the attributes that one dictionary of rotary positions decides."""
  theta = rope.get('rope_theta') or config.get('rope_theta') or default_theta
  values: JsonObject = {'ROPE_THETA': float(theta), 'ROPE_FACTOR': 1.0}
  kind = rope.get('rope_type', rope.get('type', 'default'))
  if kind == 'default':
    return values
  if kind == 'su':  # the former name of longrope in files of Phi-3
    kind = 'longrope'
  if kind not in _KEYS:
    raise UserError(f'rope_type {kind!r} is not implemented; default, {", ".join(_KEYS)} are')
  keys = _KEYS[kind]
  for name, value in rope.items():
    if name not in keys.keys() | _OTHERS | _MSCALE.keys() and value is not None:
      raise UserError(f'{name}={value!r} of rope_type {kind} is not implemented')
  if has_mscale and rope.get('attention_factor') is not None:
    raise UserError('attention_factor is not implemented where there is mscale_all_dim')
  values['ROPE_SCALING'] = kind
  is_optional = kind in ('yarn', 'longrope')
  for name, ours in keys.items():
    if rope.get(name) is not None or not is_optional:
      values[ours] = rope[name]
  if kind == 'yarn':
    values.setdefault('ROPE_WHOLE_PAIRS', True)
  if is_optional:
    longest = config['max_position_embeddings']
    outer = config.get('original_max_position_embeddings')
    length = values.setdefault('ROPE_ORIGINAL_LENGTH', outer or longest)
    if outer is not None and outer != length:
      raise UserError(f'original_max_position_embeddings is {outer}, and {length} for rope_type')
    if rope.get('factor') is None:
      values['ROPE_FACTOR'] = longest / length
    if kind == 'longrope':  # the factors for short rows, with which transformers reads short texts
      values['MAX_SEQ_LEN'] = length
      if not 1 < values['ROPE_FACTOR'] == longest / length:
        raise UserError(
          f'rope_type {kind} needs more max_position_embeddings ({longest}) than '
          f'original_max_position_embeddings ({length}), and factor must be their ratio'
        )
  if has_mscale:
    values |= {ours: rope.get(name) or 0.0 for name, ours in _MSCALE.items()}
  elif kind == 'yarn' and 'ROPE_ATTENTION_FACTOR' not in values:
    given = [rope.get(name) or 0.0 for name in _MSCALE]
    if all(given):
      one, two = (0.1 * x * math.log(values['ROPE_FACTOR']) + 1 for x in given)
      values['ROPE_ATTENTION_FACTOR'] = one / two
  stated = values.get('ROPE_ATTENTION_FACTOR')
  usual = LanguageModel(**{k: v for k, v in values.items() if k in _USUAL}).rotary_length
  if stated and math.isclose(stated, usual, rel_tol=1e-9):
    values['ROPE_ATTENTION_FACTOR'] = 0.0
  return values


def _write_one(e: LanguageModel) -> JsonObject | None:
  """Returns rope_scaling, as all versions of transformers read it."""
  if e.ROPE_FACTOR <= 1:
    return None
  keys = _KEYS[e.ROPE_SCALING]
  rope = {'rope_type': e.ROPE_SCALING} | {k: getattr(e, ours) for k, ours in keys.items()}
  if rope.get('attention_factor') == 0:
    del rope['attention_factor']
  if hasattr(e, 'ROPE_MSCALE') and e.ROPE_SCALING == 'yarn':
    rope |= {name: getattr(e, ours) for name, ours in _MSCALE.items()}
  return rope


def rope(
  *others: str,
  theta: float = 10_000.0,
  has_mscale: bool = False,
  has_local: bool = False,
  fraction: bool = False,
  is_stretched: bool = False,
) -> Both:
  """Returns the keys of a family's rotary positions.

  Args:
    *others: Further keys of the family that say the same in another way.
    theta: The base of files that state none.
    has_mscale: Whether mscale_all_dim also scales the scores of attention, as in DeepSeek.
    has_local: Whether layers with sliding attention have positions of their own.
    fraction: Whether only a part of a head may be rotated.
    is_stretched: Whether transformers stretches positions where config.json does not say.
  """

  def read(config: Config) -> dict[str, object]:
    given = config.get('rope_parameters') or config.get('rope_scaling') or {}
    if is_stretched and not given:
      raise KeyError('rope_scaling')
    kinds = given if 'full_attention' in given or 'sliding_attention' in given else {}
    local: dict[str, object] = {}
    if has_local:
      found = kinds['sliding_attention'] if kinds else {}
      if found.get('rope_type', 'default') != 'default':
        raise UserError(f'rope_parameters of sliding_attention: {found!r} is not implemented')
      base = found['rope_theta'] if kinds else config.get('rope_local_base_freq')
      local = {'ROPE_LOCAL_THETA': float(base)} if base else {}
    full = kinds.get('full_attention') or ({} if kinds else given)
    share = float(full.get('partial_rotary_factor') or config.get('partial_rotary_factor') or 1.0)
    if share != 1 and not fraction:
      raise UserError(f'partial_rotary_factor={share} is not implemented')
    if fraction and 'short_factor' in full:
      config['original_max_position_embeddings']  # a KeyError, if it is missing
    values = _read_one(full, config, has_mscale, theta)
    values |= {k: v if v != values['ROPE_THETA'] else 0.0 for k, v in local.items()}
    return values | ({'ROPE_FRACTION': share} if fraction else {})

  def write(e: LanguageModel) -> JsonObject:
    scaling, local_theta = _write_one(e), e.ROPE_LOCAL_THETA or e.ROPE_THETA
    config: JsonObject = {'rope_theta': e.ROPE_THETA}
    if scaling is not None or is_stretched:
      config['rope_scaling'] = scaling or {'rope_type': 'default'}
    if 'rope_local_base_freq' in others:
      config['rope_local_base_freq'] = local_theta
    elif has_local:
      config['rope_parameters'] = {
        'full_attention': {'rope_theta': e.ROPE_THETA, **(scaling or {'rope_type': 'default'})},
        'sliding_attention': {'rope_theta': local_theta, 'rope_type': 'default'},
      }
    if fraction:
      config['partial_rotary_factor'] = e.ROPE_FRACTION
    if e.ROPE_FACTOR > 1 and e.ROPE_SCALING == 'longrope':
      config['original_max_position_embeddings'] = e.ROPE_ORIGINAL_LENGTH
      config['max_position_embeddings'] = round(e.ROPE_FACTOR * e.ROPE_ORIGINAL_LENGTH)
    return config

  ours = set(_OURS) | {x for keys in _KEYS.values() for x in keys.values()}
  ours |= set(_MSCALE.values()) if has_mscale else set()
  ours -= {'ROPE_ATTENTION_FACTOR'} if has_mscale else set()
  ours |= {'ROPE_LOCAL_THETA'} if has_local else set()
  ours |= {'ROPE_FRACTION'} if fraction else set()
  return Both((*_NAMES, *others), sorted(ours), read, write)
