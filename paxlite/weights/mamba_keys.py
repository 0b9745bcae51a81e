"""The keys of config.json of models with short convolutions and with Mamba 2."""

import math

from paxlite.core.errors import UserError
from paxlite.core.json_text import Json, JsonObject
from paxlite.experiments.hybrid.mamba2_layers import Mamba2Layers
from paxlite.experiments.language_model import LanguageModel
from paxlite.weights.config_keys import Both, Config

# Keys and values of layer_types; the second name of a kind is that of old files, which all read.
_MAMBA = {'linear_attention': 'mamba2', 'mamba': 'mamba2'}


def mamba_kinds(attention: str) -> dict[str, str]:
  return _MAMBA | {'full_attention': attention, 'attention': attention}


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
  return {'MAMBA_DT_MIN': least, 'MAMBA_DT_MAX': 0.0 if math.isinf(most) else most}


def _write_limits(e: LanguageModel) -> JsonObject:
  assert isinstance(e, Mamba2Layers)
  least, most = e.MAMBA_DT_MIN, e.MAMBA_DT_MAX
  return {'time_step_limit': [least, most or math.inf]} if least or most else {}


STEP_LIMITS = Both(
  ('time_step_limit',), ('MAMBA_DT_MIN', 'MAMBA_DT_MAX'), _read_limits, _write_limits
)
