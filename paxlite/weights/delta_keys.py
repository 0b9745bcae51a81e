"""The keys of config.json that hybrid models have: kinds of layers, and sizes of their states."""

from collections.abc import Mapping

from paxlite.weights.config_keys import Both, Config, Same, read_types, write_types
from paxlite.weights.key_values import interval


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
    ('layer_types', 'full_attention_interval'), ('ATTENTION_PATTERN',), read,
    lambda e: {'layer_types': write_types(e, 'full', kinds)},
  )  # fmt: skip


DELTA_NET = (
  Same('linear_num_key_heads', 'DELTA_KEY_HEADS'),
  Same('linear_num_value_heads', 'DELTA_VALUE_HEADS'),
  Same('linear_key_head_dim', 'DELTA_KEY_DIMS'),
  Same('linear_value_head_dim', 'DELTA_VALUE_DIMS'),
  Same('linear_conv_kernel_dim', 'CONVOLUTION_WIDTH'),
)
DELTA_KINDS = {'linear_attention': 'gated_delta', 'full_attention': 'full'}
