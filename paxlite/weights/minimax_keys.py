"""The keys of config.json of MiniMax-Text-01: kinds of layers, and rotated dimensions."""

import logging

from paxlite.core.errors import UserError
from paxlite.core.json_text import JsonObject
from paxlite.experiments.language_model import LanguageModel
from paxlite.weights.config_keys import Both, Config, read_types, window, write_types

log = logging.getLogger('paxlite')

_WINDOW = window()


def _kinds(attention: str) -> dict[str, str]:
  return {'linear_attention': 'lightning', 'full_attention': attention}


def _read_types(config: Config) -> dict[str, object]:
  values = _WINDOW.read(config)
  softmax = 'sliding' if values['SLIDING_WINDOW'] else 'full'
  default = lambda i: 'lightning' if i % 2 else softmax
  pattern = read_types(config, default, _kinds(softmax))
  numbers, layers = config.get('attn_type_list'), config['num_hidden_layers']
  found = [int(pattern[i % len(pattern)] != 'lightning') for i in range(layers)]
  if numbers not in (None, found):
    raise UserError('attn_type_list and layer_types say different kinds of layers')
  return values | {'ATTENTION_PATTERN': pattern}


def _write_types(e: LanguageModel) -> JsonObject:
  kinds = {kind.attention for kind in e.block_kinds} - {'lightning'}
  softmax = 'sliding' if 'sliding' in kinds else 'full'
  types = write_types(e, None, _kinds(softmax))
  return {'layer_types': types, 'sliding_window': e.SLIDING_WINDOW if 'sliding' in kinds else None}


MINIMAX_TYPES = Both(
  ('layer_types', 'sliding_window', 'attn_type_list'),
  ('SLIDING_WINDOW', 'ATTENTION_PATTERN'),
  _read_types,
  _write_types,
)


def _head_width(config: Config) -> int:
  stated: int | None = config.get('head_dim')
  return config['hidden_size'] // config['num_attention_heads'] if stated is None else stated


def _read_rotated(config: Config) -> dict[str, object]:
  rotated, width = config.get('rotary_dim'), _head_width(config)
  share = 1.0 if rotated is None else rotated / width
  if not 0 < share <= 1:
    raise UserError(
      f'rotary_dim={rotated} must be above 0, and at most the width of a head {width}'
    )
  return {'ROPE_FRACTION': share}


def _write_rotated(e: LanguageModel) -> JsonObject:
  if e.ROPE_FRACTION == 1:
    return {}
  log.warning(
    'rotary_dim=%s: transformers 5.24 does not read it in this family and rotates whole heads, so '
    'it computes other logits from this export',
    e.rotary_dims,
  )
  return {'rotary_dim': e.rotary_dims}


# transformers 5.24 does not read it in this family, and rotates whole heads of a model that was
# trained with rotated halves. What is computed here is what the file says.
ROTARY_DIM = Both(('rotary_dim',), ('ROPE_FRACTION',), _read_rotated, _write_rotated)
