"""The keys of config.json that hybrid models have: kinds of layers, and sizes of their states."""

from collections.abc import Mapping

from paxlite.core.json_text import JsonObject
from paxlite.experiments.language_model import LanguageModel
from paxlite.weights.config_keys import Both, Config, Same, read_types, write_types
from paxlite.weights.rope_keys import rope


def hybrid_types(kinds: Mapping[str, str], every: int = 4) -> Both:
  """Returns the keys of the kinds of layers.

  Args:
    kinds: The kinds of ATTENTION_PATTERN by those of layer_types.
    every: In files without layer_types, of so many layers the last one has attention.
  """

  def read(config: Config) -> dict[str, object]:
    period = config.get('full_attention_interval') or every
    state = kinds['linear_attention']
    found = read_types(config, lambda i: state if (i + 1) % period else 'full', kinds)
    return {'ATTENTION_PATTERN': found}

  return Both(
    ('layer_types', 'full_attention_interval'),
    ('ATTENTION_PATTERN',),
    read,
    lambda e: {'layer_types': write_types(e, 'full', kinds)},
  )


DELTA_NET = (
  Same('linear_num_key_heads', 'DELTA_KEY_HEADS'),
  Same('linear_num_value_heads', 'DELTA_VALUE_HEADS'),
  Same('linear_key_head_dim', 'DELTA_KEY_DIMS'),
  Same('linear_value_head_dim', 'DELTA_VALUE_DIMS'),
  Same('linear_conv_kernel_dim', 'CONVOLUTION_WIDTH'),
)
DELTA_TYPES = hybrid_types({'linear_attention': 'gated_delta', 'full_attention': 'full'})
SHARED_EXPERT = Same('shared_expert_intermediate_size', 'SHARED_EXPERT_HIDDEN_DIMS')
# for positions of images, of which a text has one number each
_OF_IMAGES = ('mrope_section', 'mrope_interleaved')


def partial_rope(share: float) -> Both:
  """Returns the keys of rotary positions of a part of each head.

  Args:
    share: The part in files that do not say it.
  """
  whole, name = rope(), 'partial_rotary_factor'

  def read(config: Config) -> dict[str, object]:
    rest = {k: v for k, v in config.items() if k != name}
    found = config.get(name)
    for key in ('rope_scaling', 'rope_parameters'):
      if isinstance(given := rest.get(key), dict):
        found = given.get(name, found)
        rest[key] = {k: v for k, v in given.items() if k not in (name, *_OF_IMAGES)}
    return whole.read(rest) | {'ROPE_FRACTION': share if found is None else found}

  def write(e: LanguageModel) -> JsonObject:
    return whole.write(e) | {name: e.ROPE_FRACTION}

  return Both(whole.theirs, (*whole.ours, 'ROPE_FRACTION'), read, write)


def _expert_widths(config: Config) -> dict[str, object]:
  width = config['moe_intermediate_size']
  return {'EXPERT_HIDDEN_DIMS': width, 'HIDDEN_DIMS': config.get('intermediate_size', width)}


# All blocks have experts, and some files have the width of other blocks too.
EXPERT_WIDTH = Both(
  ('moe_intermediate_size', 'intermediate_size'),
  ('EXPERT_HIDDEN_DIMS', 'HIDDEN_DIMS'),
  _expert_widths,
  lambda e: {
    'moe_intermediate_size': e.values()['EXPERT_HIDDEN_DIMS'],
    'intermediate_size': e.HIDDEN_DIMS,
  },
)
