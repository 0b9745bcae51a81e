"""The keys of config.json of Falcon-H1: sizes of Mamba 2, and factors of activations."""

from collections.abc import Sequence

from paxlite.core.errors import UserError
from paxlite.core.json_text import Json, JsonObject
from paxlite.experiments import options
from paxlite.experiments.falcon import FalconH1
from paxlite.experiments.language_model import LanguageModel
from paxlite.weights.config_keys import Both, Config
from paxlite.weights.key_values import is_on

_SIZES = ('mamba_n_heads', 'mamba_d_head', 'mamba_d_ssm', 'mamba_expand')


def _read_heads(config: Config) -> dict[str, object]:
  count, width, inner = (config.get(key) for key in _SIZES[:3])
  if count is None:
    raise KeyError(_SIZES[0])
  if inner is None:
    if 'mamba_d_ssm' not in config:  # transformers' default does not follow from other keys
      raise KeyError('mamba_d_ssm')
    inner = int(config.get('mamba_expand', 2) * config['hidden_size'])
  if width in (None, 'auto'):
    width = inner // count
  if count * width != inner:
    raise UserError(
      f'mamba_n_heads={count} × mamba_d_head={width} must be {inner}, which is mamba_d_ssm, or '
      'mamba_expand × hidden_size'
    )
  return {'MAMBA_HEADS': count, 'MAMBA_HEAD_DIMS': width}


def _write_heads(e: LanguageModel) -> JsonObject:
  assert isinstance(e, FalconH1)
  count, width = e.MAMBA_HEADS, e.MAMBA_HEAD_DIMS
  return {'mamba_n_heads': count, 'mamba_d_head': width, 'mamba_d_ssm': count * width}


FALCON_HEADS = Both(_SIZES, ('MAMBA_HEADS', 'MAMBA_HEAD_DIMS'), _read_heads, _write_heads)


def _read_norm(config: Config) -> dict[str, object]:
  is_first = is_on(config, 'mamba_norm_before_gate', True)
  if not is_on(config, 'mamba_rms_norm'):
    return {'MAMBA_NORM': 'none'}
  return {'MAMBA_NORM': 'before_gate' if is_first else 'after_gate'}


def _write_norm(e: LanguageModel) -> JsonObject:
  assert isinstance(e, FalconH1)
  norm = e.MAMBA_NORM
  return {'mamba_rms_norm': norm != 'none', 'mamba_norm_before_gate': norm == 'before_gate'}


FALCON_NORM = Both(
  ('mamba_rms_norm', 'mamba_norm_before_gate'), ('MAMBA_NORM',), _read_norm, _write_norm
)


def _read_bias(config: Config) -> dict[str, object]:
  inner, outer = is_on(config, 'mamba_proj_bias'), is_on(config, 'projectors_bias')
  if inner != outer:
    raise UserError(f'projectors_bias={outer} beside mamba_proj_bias={inner} is not implemented')
  return {'USE_STATE_BIAS': inner}


FALCON_BIAS = Both(
  ('mamba_proj_bias', 'projectors_bias'),
  ('USE_STATE_BIAS',),
  _read_bias,
  lambda e: dict.fromkeys(('mamba_proj_bias', 'projectors_bias'), e.values()['USE_STATE_BIAS']),
)


def _numbers(key: str, value: Json, count: int) -> list[float]:
  """Returns a list of factors; null stands for factors 1."""
  given = [1.0] * count if value is None else value
  is_number = lambda x: isinstance(x, (int, float)) and not isinstance(x, bool)
  if not isinstance(given, Sequence) or len(given) != count or not all(map(is_number, given)):
    raise UserError(f'{key}={value!r} must be {count} numbers')
  return [float(x) for x in given]


_FFN = ('FFN_GATE_FACTOR', 'FFN_OUT_FACTOR')
FALCON_FACTORS = (
  Both(
    ('mlp_multipliers',),
    _FFN,
    lambda c: dict(
      zip(_FFN, _numbers('mlp_multipliers', c.get('mlp_multipliers'), 2), strict=True)
    ),
    lambda e: {'mlp_multipliers': [e.values()[name] for name in _FFN]},
  ),
  Both(
    ('ssm_multipliers',),
    ('MAMBA_FACTORS',),
    lambda c: {'MAMBA_FACTORS': _numbers('ssm_multipliers', c.get('ssm_multipliers'), 5)},
    lambda e: {'ssm_multipliers': e.values()['MAMBA_FACTORS']},
  ),
)


def _read_head(config: Config) -> dict[str, object]:
  (factor,) = _numbers('lm_head_multiplier', [config.get('lm_head_multiplier', 1.0)], 1)
  if not factor > 0:
    raise UserError(f'lm_head_multiplier={factor!r} must be above 0')
  return {'LOGITS_DIVISOR': 1 / factor}


def _write_head(e: LanguageModel) -> JsonObject:
  divisor = options.value(e, 'LOGITS_DIVISOR')
  factor = 1 / divisor
  # the shortest number with this reciprocal is the one that the file had
  shorter = (float(f'{factor:.{digits}g}') for digits in range(1, 17))
  same = (found for found in shorter if 1 / found == divisor)
  return {'lm_head_multiplier': next(same, factor)}


LM_HEAD_FACTOR = Both(('lm_head_multiplier',), ('LOGITS_DIVISOR',), _read_head, _write_head)
