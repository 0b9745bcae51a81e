"""The keys of config.json of models with short convolutions and with Mamba 2."""

from paxlite.core.errors import UserError
from paxlite.core.json_text import JsonObject
from paxlite.experiments.language_model import LanguageModel
from paxlite.weights.config_keys import Both, Config, read_types, write_types

_CONVOLUTIONS = {'conv': 'short_convolution', 'full_attention': 'full'}


def _read_lfm2_types(config: Config) -> dict[str, object]:
  attention = config.get('full_attn_idxs')
  kind = lambda i: 'full' if attention is None or i in attention else 'short_convolution'
  return {'ATTENTION_PATTERN': read_types(config, kind, _CONVOLUTIONS)}


LFM2_TYPES = Both(
  ('layer_types', 'full_attn_idxs'),
  ('ATTENTION_PATTERN',),
  _read_lfm2_types,
  lambda e: {'layer_types': write_types(e, 'full', _CONVOLUTIONS)},
)


def _read_lfm2_width(config: Config) -> dict[str, object]:
  stated = config.get('block_ff_dim')
  width = config['intermediate_size'] if stated is None else stated
  adjusts, factor = (
    config.get('block_auto_adjust_ff_dim', True),
    config.get('block_ffn_dim_multiplier', 1.0),
  )
  if adjusts:
    width = int(2 * width / 3)
    if factor is not None:
      multiple = config.get('block_multiple_of', 256)
      width = multiple * -(-int(factor * width) // multiple)
  return {'HIDDEN_DIMS': width}


# A width is stated as it is, or as that of a layer without gates, of which two thirds are taken.
LFM2_WIDTH = Both(
  (
    'intermediate_size', 'block_ff_dim', 'block_auto_adjust_ff_dim', 'block_ffn_dim_multiplier',
    'block_multiple_of',
  ),
  ('HIDDEN_DIMS',),
  _read_lfm2_width,
  lambda e: {'intermediate_size': e.HIDDEN_DIMS, 'block_auto_adjust_ff_dim': False},
)  # fmt: skip


def _tied(config: Config) -> dict[str, object]:
  tied = config.get('tie_embedding', config.get('tie_word_embeddings', True))
  return {'SEPARATE_EMBEDDING': not tied}


LFM2_TIED = Both(
  ('tie_word_embeddings', 'tie_embedding'),
  ('SEPARATE_EMBEDDING',),
  _tied,
  lambda e: {'tie_word_embeddings': not e.SEPARATE_EMBEDDING},
)


def _write_lfm2_bias(e: LanguageModel) -> JsonObject:
  values = e.values()
  if values['USE_CONVOLUTION_BIAS'] != values['USE_STATE_BIAS']:
    raise UserError('Hugging Face has one key for USE_CONVOLUTION_BIAS and USE_STATE_BIAS')
  return {'conv_bias': values['USE_STATE_BIAS']}


_BIASES = ('USE_CONVOLUTION_BIAS', 'USE_STATE_BIAS')
LFM2_BIAS = Both(
  ('conv_bias',),
  _BIASES,
  lambda config: dict.fromkeys(_BIASES, config.get('conv_bias', False)),
  _write_lfm2_bias,
)
