"""The keys of a Hugging Face config.json about rotary positions, in old and new files.

Old files have rope_scaling, with rope_theta beside it; new files have rope_parameters, which holds
both. A file that has both means what transformers makes of it: rope_scaling comes first.
"""

import math

from paxlite.core.errors import UserError
from paxlite.core.json_text import Json, JsonObject
from paxlite.experiments import options
from paxlite.experiments.language_model import LanguageModel
from paxlite.weights.config_keys import Both, Config

# Keys by rope_type, with their attributes.
_COMMON = {'factor': 'ROPE_FACTOR', 'original_max_position_embeddings': 'ROPE_ORIGINAL_LENGTH'}
KEYS: dict[str, dict[str, str]] = {
  'default': {},
  'linear': {'factor': 'ROPE_FACTOR'},
  'llama3': _COMMON
  | {
    'low_freq_factor': 'ROPE_LOW_FREQUENCY_FACTOR',
    'high_freq_factor': 'ROPE_HIGH_FREQUENCY_FACTOR',
  },
  'yarn': _COMMON
  | {
    'beta_fast': 'ROPE_BETA_FAST', 'beta_slow': 'ROPE_BETA_SLOW', 'truncate': 'ROPE_WHOLE_PAIRS',
    'attention_factor': 'ROPE_ATTENTION_FACTOR',
  },
  'longrope': _COMMON
  | {
    'short_factor': 'ROPE_SHORT_FACTORS',
    'long_factor': 'ROPE_LONG_FACTORS',
    'attention_factor': 'ROPE_ATTENTION_FACTOR',
  },
}  # fmt: skip
MSCALE = {'mscale': 'ROPE_MSCALE', 'mscale_all_dim': 'ROPE_MSCALE_ALL_DIM'}  # of yarn
# Keys of every rope_type, and keys that change nothing.
_OTHERS = {'rope_type', 'type', 'rope_theta', 'partial_rotary_factor'}
# the last two are about positions of images, of which a text has one number each
HARMLESS = {'max_position_embeddings', 'finetuned', 'mrope_section', 'mrope_interleaved'}
_USUAL = ('ROPE_FACTOR', 'ROPE_SCALING', 'ROPE_ORIGINAL_LENGTH')  # give the usual factor
_NAMES = ('rope_scaling', 'rope_parameters')
_OURS = ('ROPE_THETA', 'ROPE_FACTOR', 'ROPE_SCALING', 'ROPE_ORIGINAL_LENGTH', 'MAX_SEQ_LEN')
_GROWTH = 'llama_4_scaling_beta'
_BY_LENGTH = 'dynamic'
_FULL, _SLIDING = 'full_attention', 'sliding_attention'


def _number(value: Json, name: str) -> float:
  if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
    raise UserError(f'{name}={value!r} must be a number above 0')
  return float(value)


def _check_names(rope: Config, kind: str) -> None:
  """Raises UserError for keys that are unknown, and for keys that a rope_type does not read."""
  known = KEYS[kind].keys() | _OTHERS | HARMLESS | (MSCALE.keys() if kind == 'yarn' else set())
  elsewhere = {name for keys in (*KEYS.values(), MSCALE) for name in keys}
  for name, value in rope.items():
    if name in known or value is None:
      continue
    if name in elsewhere:
      raise UserError(f'{name}={value!r} has no effect with rope_type {kind}: one of them is wrong')
    raise UserError(f'{name}={value!r} of rope_type {kind} is not supported')


def _not_yet_stretched(rope: Config) -> JsonObject:
  """Returns the attributes that rope_type dynamic decides for texts that it does not stretch.

  These have up to max_position_embeddings tokens, the positions of the model. For a longer text
  transformers computes another base, which depends on the longest text of a batch and changes while
  a text is generated. ROPE_SCALING=ntk has the base of one length.
  """
  _number(rope['factor'], 'factor')
  known = {'factor'} | _OTHERS | HARMLESS
  for name, value in rope.items():
    if name not in known and value not in (None, 0):
      raise UserError(f'{name}={value!r} of rope_type {_BY_LENGTH} is not supported')
  return {'ROPE_SCALING': 'ntk'}


def _read_one(
  rope: Config, config: Config, theta: Json, has_mscale: bool, is_phi3: bool
) -> JsonObject:
  """Returns the attributes that one dictionary of rotary positions decides.

  Args:
    rope: The dictionary.
    config: All keys of the file.
    theta: The base where the dictionary has none.
    has_mscale: As for rope.
    is_phi3: As for rope.
  """
  theta = _number(rope.get('rope_theta', theta), 'rope_theta')
  values: JsonObject = {'ROPE_THETA': theta, 'ROPE_FACTOR': 1.0}
  kind = rope.get('rope_type', rope.get('type', 'default'))
  if kind == _BY_LENGTH:
    return values | _not_yet_stretched(rope)
  if is_phi3 and kind in ('su', 'yarn'):  # transformers' former names of longrope in Phi-3
    kind = 'longrope'
  if kind not in list(KEYS):
    raise UserError(f'rope_type {kind!r} is not supported; {", ".join([*KEYS, _BY_LENGTH])} are')
  _check_names(rope, kind)
  if kind == 'default':
    return values
  if has_mscale and rope.get('attention_factor') is not None:
    raise UserError('attention_factor is not supported where there is mscale_all_dim')
  if rope.get('attention_factor') is not None:
    _number(rope['attention_factor'], 'attention_factor')
  values['ROPE_SCALING'] = kind
  is_optional = kind in ('yarn', 'longrope')
  if kind == 'yarn':
    rope['factor']  # may be null, but transformers wants the key
  for name, ours in KEYS[kind].items():
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
    values |= {ours: rope.get(name) or 0.0 for name, ours in MSCALE.items()}
  elif kind == 'yarn' and 'ROPE_ATTENTION_FACTOR' not in values:
    given = [rope.get(name) or 0.0 for name in MSCALE]
    if all(given):
      one, two = (0.1 * x * math.log(max(values['ROPE_FACTOR'], 1)) + 1 for x in given)
      values['ROPE_ATTENTION_FACTOR'] = one / two
  if is_optional and not has_mscale:  # a class may have another default
    values.setdefault('ROPE_ATTENTION_FACTOR', 0.0)
  stated = values.get('ROPE_ATTENTION_FACTOR')
  usual = LanguageModel(**{k: v for k, v in values.items() if k in _USUAL}).rotary_length
  if stated and math.isclose(stated, usual, rel_tol=1e-9):
    values['ROPE_ATTENTION_FACTOR'] = 0.0
  return values


def _by_kind(config: Config) -> tuple[JsonObject, JsonObject]:
  """Returns the dictionaries of full and of sliding attention, as transformers finds them.

  rope_scaling changes that of full attention alone.
  """
  plain = {'rope_type': 'default'}
  given = config.get('rope_parameters')
  parts = {_FULL: plain, _SLIDING: plain} if given is None else dict(given)
  if unread := parts.keys() - {_FULL, _SLIDING}:
    raise UserError(
      f'{min(unread)}={parts[min(unread)]!r} of rope_parameters has no effect: this family has '
      f'{_FULL} and {_SLIDING} there'
    )
  if config.get('rope_scaling') is not None:
    parts[_FULL] = parts[_FULL] | config['rope_scaling']
  full, local = (dict(parts.get(kind) or plain) for kind in (_FULL, _SLIDING))
  for name, value in local.items():
    if name not in ('rope_type', 'type', 'rope_theta') and value is not None:
      raise UserError(f'{name}={value!r} of {_SLIDING} is not supported')
  if local.get('rope_type', local.get('type', 'default')) != 'default':
    raise UserError(f'rope_parameters of sliding_attention: {local!r} is not supported')
  return full, local


def _write_one(e: LanguageModel) -> JsonObject | None:
  """Returns rope_scaling, as all versions of transformers read it."""
  if not e.stretches_positions or e.ROPE_SCALING == 'ntk':
    return None  # another base says all of ntk
  keys = KEYS[e.ROPE_SCALING]
  rope = {'rope_type': e.ROPE_SCALING} | {k: getattr(e, ours) for k, ours in keys.items()}
  if rope.get('attention_factor') == 0:
    del rope['attention_factor']
  if hasattr(e, 'ROPE_MSCALE') and e.ROPE_SCALING == 'yarn':
    rope |= {name: getattr(e, ours) for name, ours in MSCALE.items()}
  return rope


def rope(
  *others: str,
  theta: float = 10_000.0,
  local_theta: float = 0.0,
  has_mscale: bool = False,
  fraction: float = 0.0,
  is_phi3: bool = False,
  is_stretched: bool = False,
  has_growth: bool = False,
  names: tuple[str, str] = ('rope_theta', 'partial_rotary_factor'),
) -> Both:
  """Returns the keys of a family's rotary positions.

  Args:
    *others: Further keys of the family that say the same in another way.
    theta: The base of files that state none.
    local_theta: The same for layers with sliding attention, where these have positions of their
      own; 0: they have none.
    has_mscale: Whether mscale_all_dim also scales the scores of attention, as in DeepSeek.
    fraction: The rotated share of a head in files that state none; 0: heads are rotated whole.
    is_phi3: Whether rope_type has the former names of Phi-3, and no values but longrope.
    is_stretched: Whether transformers stretches positions where config.json does not say.
    has_growth: Whether the same dictionary says how queries grow with their positions.
    names: The names of rope_theta and partial_rotary_factor where they stand alone.
  """

  def read(config: Config) -> dict[str, object]:
    base, local = config.get(names[0], theta), {}
    if local_theta:
      full, sliding = _by_kind(config)
      default = config.get('rope_local_base_freq', local_theta)
      local = {'ROPE_LOCAL_THETA': _number(sliding.get('rope_theta', default), 'rope_theta')}
    else:
      full = config.get('rope_scaling') or config.get('rope_parameters') or {}
      if is_stretched and not full:
        raise KeyError('rope_scaling')
    growth: JsonObject = {}
    if has_growth:
      growth, full = _growth(full)
    share = full.get('partial_rotary_factor', config.get(names[1], fraction or 1.0))
    share = _number(1.0 if share is None else share, 'partial_rotary_factor')
    if share != 1 and not fraction:
      raise UserError(f'partial_rotary_factor={share} is not supported')
    if is_phi3 and 'short_factor' in full:
      config['original_max_position_embeddings']  # a KeyError, if it is missing
    values: dict[str, object] = dict(_read_one(full, config, base, has_mscale, is_phi3))
    values |= {k: v if v != values['ROPE_THETA'] else 0.0 for k, v in local.items()}
    return values | growth | ({'ROPE_FRACTION': share} if fraction else {})

  def write(e: LanguageModel) -> JsonObject:
    scaling, written = _write_one(e), e.rotary_base(is_local=True)
    kinds = ['longrope'] if is_phi3 else ['yarn', 'llama3'] if has_growth else list(KEYS)
    if scaling is not None and e.ROPE_SCALING not in kinds:
      raise UserError(f'Hugging Face has no ROPE_SCALING={e.ROPE_SCALING} in this family')
    config: JsonObject = {names[0]: e.rotary_base()}
    if has_growth:
      plain = {'rope_type': 'yarn', 'factor': 1.0}
      scaling = (scaling or plain) | {
        'original_max_position_embeddings': e.ROPE_ORIGINAL_LENGTH,
        _GROWTH: options.value(e, 'ATTENTION_TEMPERATURE_SCALE'),
      }
    if scaling is not None or is_stretched:
      config['rope_scaling'] = scaling or {'rope_type': 'default'}
    if 'rope_local_base_freq' in others:
      config['rope_local_base_freq'] = written
    elif local_theta:
      config['rope_parameters'] = {
        _FULL: {'rope_theta': e.rotary_base(), **(scaling or {'rope_type': 'default'})},
        _SLIDING: {'rope_theta': written, 'rope_type': 'default'},
      }
    if fraction:
      config[names[1]] = options.value(e, 'ROPE_FRACTION')
    if scaling is not None and e.ROPE_SCALING == 'longrope':
      config['original_max_position_embeddings'] = e.ROPE_ORIGINAL_LENGTH
      config['max_position_embeddings'] = round(e.ROPE_FACTOR * e.ROPE_ORIGINAL_LENGTH)
    return config

  ours = set(_OURS) | {x for keys in KEYS.values() for x in keys.values()}
  ours |= set(MSCALE.values()) if has_mscale else set()
  ours -= {'ROPE_ATTENTION_FACTOR'} if has_mscale else set()
  ours |= {'ROPE_LOCAL_THETA'} if local_theta else set()
  ours |= {'ROPE_FRACTION'} if fraction else set()
  ours |= {'ATTENTION_TEMPERATURE_SCALE'} if has_growth else set()
  return Both((*names, *_NAMES, *others), sorted(ours), read, write)


def _growth(full: Config) -> tuple[JsonObject, JsonObject]:
  """Returns the attribute of growing queries, and a dictionary without the key of it."""
  growth = full[_GROWTH]
  if isinstance(growth, bool) or not isinstance(growth, (int, float)) or not growth >= 0:
    raise UserError(f'{_GROWTH}={growth!r} must be a number, and not negative')
  if full.get('rope_type', full.get('type')) not in ('yarn', 'llama3'):
    raise UserError(f'{_GROWTH} is implemented for rope_type yarn and llama3')
  return {'ATTENTION_TEMPERATURE_SCALE': float(growth)}, {
    k: v for k, v in full.items() if k != _GROWTH
  }
