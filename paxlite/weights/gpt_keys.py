"""The keys of config.json that descendants of GPT-2 have."""

import math

from paxlite.core.errors import UserError
from paxlite.core.json_text import JsonObject
from paxlite.experiments.language_model import LanguageModel
from paxlite.weights.config_keys import (
  Both,
  Config,
  Key,
  Same,
  activation,
  positions,
  read_types,
  write_types,
)
from paxlite.weights.key_values import integer
from paxlite.weights.known_keys import shortened


def hidden_dims(key: str, of: str) -> Both:
  """Returns the key of the width of feed-forward layers, which is null for four times another."""
  return Both(
    (key,),
    ('HIDDEN_DIMS',),
    lambda c: {'HIDDEN_DIMS': c.get(key) or 4 * c[of]},
    lambda e: {key: e.HIDDEN_DIMS},
  )


def gpt_sizes(gelu: str = 'gelu_new') -> tuple[Key, ...]:
  """Returns the keys of GPT-2's sizes.

  Args:
    gelu: The family's own name of GELU's approximation, which is written, and its default.
  """
  return (
    Same('n_layer', 'NUM_LAYERS'),
    Same('n_head', 'NUM_HEADS'),
    Same('n_embd', 'MODEL_DIMS'),
    Same('vocab_size', 'VOCAB_SIZE'),
    Same('layer_norm_epsilon', 'LAYERNORM_EPSILON', default=1e-5),
    positions('n_positions'),
    activation('activation_function', default=gelu, written=gelu),
    hidden_dims('n_inner', of='n_embd'),
  )


def _read_rotated(config: Config) -> dict[str, object]:
  rotated, heads = config.get('rotary_dim', 64), integer(config, 'n_head')
  if isinstance(rotated, bool) or not isinstance(rotated, int) or rotated <= 0:
    raise UserError(f'rotary_dim={rotated!r} must be an integer above 0')
  if heads < 1:
    raise UserError(f'n_head={heads} must be at least 1')
  width = integer(config, 'n_embd') // heads
  if rotated > width:
    raise UserError(f'rotary_dim={rotated} is more than the {width} dimensions of a head')
  share = rotated / width
  # a quotient may be rounded down, and the product is cut off
  return {'ROPE_FRACTION': share if int(width * share) == rotated else math.nextafter(share, 1)}


ROTARY_DIM = Both(
  ('rotary_dim',), ('ROPE_FRACTION',), _read_rotated, lambda e: {'rotary_dim': e.rotary_dims}
)

_KINDS = {'global': 'full', 'local': 'sliding'}


def _read_neo(config: Config) -> dict[str, object]:
  layers, types = config['num_layers'], config.get('attention_types')
  if types is None:
    types = [[['global', 'local'], 12]]
  given = [kind for kinds, times in types for _ in range(min(times, layers)) for kind in kinds]
  stated = config.get('attention_layers')
  if stated not in (None, given):
    raise UserError(
      f'attention_layers={shortened(stated)} and attention_types={shortened(types)} disagree'
    )
  found = read_types({'num_hidden_layers': layers, 'layer_types': given}, lambda i: '', _KINDS)
  return {'SLIDING_WINDOW': config.get('window_size', 256), 'ATTENTION_PATTERN': found}


def _write_neo(e: LanguageModel) -> JsonObject:
  kinds = write_types(e, 'sliding' if e.SLIDING_WINDOW else 'full', _KINDS)
  return {
    'attention_types': [[[kind], 1] for kind in kinds],
    'window_size': e.SLIDING_WINDOW or 256,
  }


NEO_LAYERS = Both(
  ('attention_types', 'attention_layers', 'window_size'),
  ('SLIDING_WINDOW', 'ATTENTION_PATTERN'),
  _read_neo,
  _write_neo,
)
