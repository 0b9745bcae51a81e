"""The keys of config.json that hybrid models have: kinds of layers, and sizes of their states."""

from collections.abc import Mapping
from typing import Any

from paxlite.core.errors import UserError
from paxlite.core.json_text import JsonObject
from paxlite.experiments.language_model import LanguageModel
from paxlite.weights.config_keys import Both, Config, Same, read_types, write_types
from paxlite.weights.key_values import interval, is_on
from paxlite.weights.rope_keys import rope


def hybrid_types(kinds: Mapping[str, str], every: int = 4) -> Both:
  """Returns the keys of the kinds of layers.

  Args:
    kinds: The kinds of ATTENTION_PATTERN by those of layer_types.
    every: In files without layer_types, of so many layers the last one has attention.
  """

  def read(config: Config) -> dict[str, object]:
    period = interval(config, 'full_attention_interval', every)
    state = kinds['linear_attention']
    found = read_types(config, lambda i: state if (i + 1) % period else 'full', kinds)
    return {'ATTENTION_PATTERN': found}

  return Both(
    ('layer_types', 'full_attention_interval'),
    ('ATTENTION_PATTERN',),
    read,
    lambda e: {'layer_types': write_types(e, 'full', kinds)},
  )


def types_without_positions(kinds: Mapping[str, str]) -> Both:
  """Returns the keys of the kinds of layers and of rotary positions, which a file may not have.

  Args:
    kinds: As for hybrid_types. Attention without positions is 'full_nope'.
  """
  types, whole = hybrid_types(kinds), rope()

  def has_positions(config: Config) -> bool:
    given = config.get('rope_scaling') or config.get('rope_parameters') or {}
    return config.get('rope_theta', given.get('rope_theta', 0)) is not None  # null says so

  def read(config: Config) -> dict[str, object]:
    values = types.read(config)
    if has_positions(config):
      return values | whole.read(config)
    pattern: Any = values['ATTENTION_PATTERN']
    return {'ATTENTION_PATTERN': ['full_nope' if kind == 'full' else kind for kind in pattern]}

  def write(e: LanguageModel) -> JsonObject:
    found = {kind.attention for kind in e.block_kinds}
    if 'full_nope' not in found:
      return types.write(e) | whole.write(e)
    if 'full' in found:
      raise UserError('Hugging Face has no family with full and full_nope beside states')
    nope = {**kinds, 'full_attention': 'full_nope'}
    return {
      'layer_types': write_types(e, 'full_nope', nope),
      'rope_parameters': {'rope_type': 'default', 'rope_theta': None},
    }

  return Both((*types.theirs, *whole.theirs), (*types.ours, *whole.ours), read, write)


def _beta_scale(config: Config) -> dict[str, object]:
  return {'DELTA_BETA_SCALE': 2.0 if is_on(config, 'linear_allow_neg_eigval', True) else 1.0}


def _allows_negative(e: LanguageModel) -> JsonObject:
  scale = e.values()['DELTA_BETA_SCALE']
  if scale not in (1, 2):
    raise UserError(f'Hugging Face has no DELTA_BETA_SCALE={scale}: it is 1 or 2 there')
  return {'linear_allow_neg_eigval': scale == 2}


BETA_SCALE = Both(
  ('linear_allow_neg_eigval',), ('DELTA_BETA_SCALE',), _beta_scale, _allows_negative
)
DELTA_NET = (
  Same('linear_num_key_heads', 'DELTA_KEY_HEADS'),
  Same('linear_num_value_heads', 'DELTA_VALUE_HEADS'),
  Same('linear_key_head_dim', 'DELTA_KEY_DIMS'),
  Same('linear_value_head_dim', 'DELTA_VALUE_DIMS'),
  Same('linear_conv_kernel_dim', 'CONVOLUTION_WIDTH'),
)
DELTA_KINDS = {'linear_attention': 'gated_delta', 'full_attention': 'full'}
DELTA_TYPES = hybrid_types(DELTA_KINDS)
SHARED_EXPERT = Same('shared_expert_intermediate_size', 'SHARED_EXPERT_HIDDEN_DIMS')


def expert_width(other: int = 0) -> Both:
  """Returns the width of experts, which all blocks have; some files have that of other blocks too.

  Args:
    other: The width of other blocks in files that do not say it; 0: that of an expert.
  """

  def read(config: Config) -> dict[str, object]:
    width = config['moe_intermediate_size']
    hidden = config.get('intermediate_size', other or width)
    return {'EXPERT_HIDDEN_DIMS': width, 'HIDDEN_DIMS': hidden}

  return Both(
    ('moe_intermediate_size', 'intermediate_size'),
    ('EXPERT_HIDDEN_DIMS', 'HIDDEN_DIMS'),
    read,
    lambda e: {
      'moe_intermediate_size': e.values()['EXPERT_HIDDEN_DIMS'],
      'intermediate_size': e.HIDDEN_DIMS,
    },
  )
