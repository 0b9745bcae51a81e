"""How the published models of Falcon-H1 are stored; see weights.family."""

import dataclasses
from collections.abc import Mapping, Sequence

from paxlite.core.errors import UserError
from paxlite.core.json_text import Json, JsonObject
from paxlite.experiments import options
from paxlite.experiments.falcon import FalconH1
from paxlite.experiments.hybrid.mamba2_layers import Mamba2Layers
from paxlite.experiments.language_model import LanguageModel
from paxlite.weights import tensor_names
from paxlite.weights.config_keys import Both, Config, Same, activation, heads
from paxlite.weights.family import Family
from paxlite.weights.family_keys import MODEL_COUNTS, UNTIED, number, only, unread
from paxlite.weights.key_values import is_on
from paxlite.weights.layout import decoder_entries
from paxlite.weights.mamba_keys import STEP_LIMITS
from paxlite.weights.rope_keys import rope
from paxlite.weights.state_layout import mamba2_entries
from paxlite.weights.tensor_entries import Entry

# Each block has attention and Mamba 2.
FALCON_H1 = tensor_names.HUGGING_FACE | tensor_names.MAMBA2 | {
  'final_norm': 'model.final_layernorm.weight',
  'ffn_norm': 'model.layers.{i}.pre_ff_layernorm.weight',
  'gate': 'model.layers.{i}.feed_forward.gate_proj.weight',
  'up': 'model.layers.{i}.feed_forward.up_proj.weight',
  'down': 'model.layers.{i}.feed_forward.down_proj.weight',
}  # fmt: skip
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
    raise UserError(f'projectors_bias={outer} with mamba_proj_bias={inner} is not supported')
  return {'USE_STATE_BIAS': inner}


FALCON_BIAS = Both(
  ('mamba_proj_bias', 'projectors_bias'), ('USE_STATE_BIAS',), _read_bias,
  lambda e: dict.fromkeys(('mamba_proj_bias', 'projectors_bias'), e.values()['USE_STATE_BIAS']),
)  # fmt: skip


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


def side_by_side_entries(e: LanguageModel, names: Mapping[str, str]) -> list[Entry]:
  """Returns the entries of a decoder each of whose blocks has attention and Mamba 2.

  The arguments are those of single_block_entries.
  """
  entries = [
    dataclasses.replace(
      entry, ours=entry.ours.replace('/self_attention/', '/self_attention/attention/')
    )
    for entry in decoder_entries(e, names, 'half')
  ]
  assert isinstance(e, Mamba2Layers)
  for i, block in enumerate(e.block_names):
    name = {role: text.replace('{i}', str(i)) for role, text in names.items()}
    entries += mamba2_entries(e, name, f'transformer/{block}/self_attention/state')
  return entries


FAMILIES: dict[str, Family] = {
  'falcon_h1': Family(
    'FalconH1ForCausalLM', FalconH1,
    (
      *MODEL_COUNTS, heads('num_key_value_heads'), Same('intermediate_size', 'HIDDEN_DIMS'),
      Same('rms_norm_eps', 'LAYERNORM_EPSILON', default=1e-5), UNTIED, rope(),
      activation('hidden_act', ours=('ACTIVATION_CLS', 'MAMBA_ACTIVATION_CLS')),
      Same('attention_bias', 'USE_BIAS', default=False),
      Same('mlp_bias', 'USE_FFN_BIAS', default=False),
      number('embedding_multiplier', 'EMBEDDING_FACTOR'), LM_HEAD_FACTOR,
      number('key_multiplier', 'KEY_FACTOR'),
      number('attention_in_multiplier', 'ATTENTION_IN_FACTOR'),
      number('attention_out_multiplier', 'ATTENTION_OUT_FACTOR'),
      number('ssm_in_multiplier', 'MAMBA_IN_FACTOR'),
      number('ssm_out_multiplier', 'MAMBA_OUT_FACTOR'), *FALCON_FACTORS,
      FALCON_HEADS, FALCON_NORM, FALCON_BIAS, STEP_LIMITS,
      Same('mamba_n_groups', 'MAMBA_GROUPS', default=1),
      Same('mamba_d_state', 'MAMBA_STATE_DIMS', default=256),
      Same('mamba_d_conv', 'CONVOLUTION_WIDTH', default=4),
      Same('mamba_conv_bias', 'USE_CONVOLUTION_BIAS', default=True),
      # in published files, which transformers does not read
      only('mamba_use_mlp', True), only('attn_layer_indices', None),
      unread('num_logits_to_keep', 'mlp_expansion_factor'),
    ),
    FALCON_H1,
    entries=lambda e: side_by_side_entries(e, FALCON_H1),
    classifier=None,
  ),
}  # fmt: skip
