"""How the published models of EXAONE 4 are stored; see weights.family."""

from paxlite.core.errors import UserError
from paxlite.core.json_text import JsonObject
from paxlite.experiments.exaone import Exaone4
from paxlite.experiments.language_model import LanguageModel
from paxlite.weights import tensor_names
from paxlite.weights.config_keys import Both, Config, read_types, write_types
from paxlite.weights.family import Family
from paxlite.weights.family_keys import COMMON, GIVEN_KV
from paxlite.weights.key_values import interval


def _read_exaone(config: Config) -> dict[str, object]:
  window, given = config.get('sliding_window', 4096), config.get('layer_types')
  period = config.get('sliding_window_pattern', 4)
  if given is None and (window is None or isinstance(period, str) or not period):
    raise KeyError('layer_types')
  if given is None:
    period = interval(config, 'sliding_window_pattern', 4)
  pattern = read_types(config, lambda i: 'full_nope' if (i + 1) % period == 0 else 'sliding', _NOPE)
  if window is not None:
    return {'SLIDING_WINDOW': window, 'ATTENTION_PATTERN': pattern}
  if 'sliding' in pattern:
    raise UserError('layer_types with sliding_attention needs a sliding_window')
  return {'SLIDING_WINDOW': 0, 'ATTENTION_PATTERN': []}


def _write_exaone(e: LanguageModel) -> JsonObject:
  if e.SLIDING_WINDOW:
    return {'sliding_window': e.SLIDING_WINDOW, 'layer_types': write_types(e, 'sliding', _NOPE)}
  types = write_types(e, 'full')  # all of them with rotary positions
  return {'sliding_window': None, 'layer_types': types}


_NOPE = {'sliding_attention': 'sliding', 'full_attention': 'full_nope'}
# Without a window, full attention has rotary positions; beside sliding attention, it has none.
EXAONE_LAYERS = Both(
  ('layer_types', 'sliding_window', 'sliding_window_pattern'),
  ('SLIDING_WINDOW', 'ATTENTION_PATTERN'), _read_exaone, _write_exaone,
)  # fmt: skip

FAMILIES: dict[str, Family] = {
  'exaone4': Family(
    'Exaone4ForCausalLM', Exaone4, (*GIVEN_KV, *COMMON, EXAONE_LAYERS), tensor_names.OLMO2
  ),
}  # fmt: skip
