"""How the published models of LFM2 are stored; see weights.family."""

from collections.abc import Mapping

from paxlite.core.errors import UserError
from paxlite.core.json_text import JsonObject
from paxlite.experiments.hybrid.layers_with_state import LayersWithState
from paxlite.experiments.language_model import LanguageModel
from paxlite.experiments.lfm import LFM2, ShortConvolutionLayers
from paxlite.weights import tensor_names
from paxlite.weights.config_keys import (
  Both,
  Config,
  OneOf,
  Repeated,
  Same,
  heads,
  read_types,
  write_types,
)
from paxlite.weights.family import Family
from paxlite.weights.family_keys import MODEL_COUNTS
from paxlite.weights.key_values import is_on
from paxlite.weights.rope_keys import rope
from paxlite.weights.state_layout import output_entries, row_entries
from paxlite.weights.tensor_entries import Entry

LFM2_NAMES = tensor_names.HUGGING_FACE | {
  'final_norm': 'model.embedding_norm.weight',
  'attention_norm': 'model.layers.{i}.operator_norm.weight',
  'ffn_norm': 'model.layers.{i}.ffn_norm.weight',
  'post': 'model.layers.{i}.self_attn.out_proj.weight',
  'query_norm': 'model.layers.{i}.self_attn.q_layernorm.weight',
  'key_norm': 'model.layers.{i}.self_attn.k_layernorm.weight',
  'gate': 'model.layers.{i}.feed_forward.w1.weight',
  'up': 'model.layers.{i}.feed_forward.w3.weight',
  'down': 'model.layers.{i}.feed_forward.w2.weight',
  'convolution_in': 'model.layers.{i}.conv.in_proj.weight',
  'convolution': 'model.layers.{i}.conv.conv.weight',
  'convolution_post': 'model.layers.{i}.conv.out_proj.weight',
}
_CONVOLUTIONS = {'conv': 'short_convolution', 'full_attention': 'full'}


def _read_lfm2_types(config: Config) -> dict[str, object]:
  attention = config.get('full_attn_idxs')
  kind = lambda i: 'full' if attention is None or i in attention else 'short_convolution'
  return {'ATTENTION_PATTERN': read_types(config, kind, _CONVOLUTIONS)}


LFM2_TYPES = Both(
  ('layer_types', 'full_attn_idxs'), ('ATTENTION_PATTERN',), _read_lfm2_types,
  lambda e: {'layer_types': write_types(e, 'full', _CONVOLUTIONS)},
)  # fmt: skip


def _read_lfm2_width(config: Config) -> dict[str, object]:
  stated = config.get('block_ff_dim')
  width = config['intermediate_size'] if stated is None else stated
  adjusts, factor = (
    is_on(config, 'block_auto_adjust_ff_dim', True),
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
  name = 'tie_embedding' if 'tie_embedding' in config else 'tie_word_embeddings'
  return {'SEPARATE_EMBEDDING': not is_on(config, name, True)}


LFM2_TIED = Both(
  ('tie_word_embeddings', 'tie_embedding'), ('SEPARATE_EMBEDDING',), _tied,
  lambda e: {'tie_word_embeddings': not e.SEPARATE_EMBEDDING},
)  # fmt: skip


def _write_lfm2_bias(e: LanguageModel) -> JsonObject:
  assert isinstance(e, LayersWithState)
  if e.USE_CONVOLUTION_BIAS != e.USE_STATE_BIAS:
    raise UserError('Hugging Face has one key for USE_CONVOLUTION_BIAS and USE_STATE_BIAS')
  return {'conv_bias': e.USE_STATE_BIAS}


_BIASES = ('USE_CONVOLUTION_BIAS', 'USE_STATE_BIAS')
LFM2_BIAS = Both(
  ('conv_bias',), _BIASES, lambda config: dict.fromkeys(_BIASES, is_on(config, 'conv_bias')),
  _write_lfm2_bias,
)  # fmt: skip


def short_convolution_entries(
  e: ShortConvolutionLayers, name: Mapping[str, str], ours: str
) -> list[Entry]:
  """Returns the entries of a short convolution; the arguments are those of delta_net_entries."""
  D, W = e.MODEL_DIMS, e.CONVOLUTION_WIDTH
  rows = {role: slice(i * D, (i + 1) * D) for i, role in enumerate(('gate', 'after', 'value'))}
  of_rows = [(part, f'{ours}/{role}', (D,)) for role, part in rows.items()]
  channels = slice(0, D)
  return [
    *row_entries(name['convolution_in'], (3 * D, D), of_rows, e.USE_STATE_BIAS),
    *row_entries(
      name['convolution'], (D, 1, W), [(channels, f'{ours}/convolution', (D,))],
      e.USE_CONVOLUTION_BIAS,
    ),
    *output_entries(name['convolution_post'], f'{ours}/post', (D, D), e.USE_STATE_BIAS),
  ]  # fmt: skip


FAMILIES: dict[str, Family] = {
  'lfm2': Family(
    'Lfm2ForCausalLM', LFM2,
    (
      *MODEL_COUNTS, heads('num_key_value_heads'),
      Same('norm_eps', 'LAYERNORM_EPSILON', default=1e-5),
      Same('conv_L_cache', 'CONVOLUTION_WIDTH', default=3), rope(theta=1e6),
      LFM2_WIDTH, LFM2_TYPES, LFM2_BIAS, LFM2_TIED,
      # transformers does not read these
      Repeated('num_layers', 'num_hidden_layers'), Repeated('num_heads', 'num_attention_heads'),
      Repeated('block_dim', 'hidden_size'), Repeated('conv_dim', 'hidden_size'),
      Repeated('conv_dim_out', 'hidden_size'), Repeated('block_norm_eps', 'norm_eps'),
      Repeated('theta', 'rope_theta'), OneOf('use_pos_enc', True), OneOf('block_use_swiglu', True),
    ),
    LFM2_NAMES,
    classifier=None,
    layers={'short_convolution': short_convolution_entries},
  ),
}  # fmt: skip
