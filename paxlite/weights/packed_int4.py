"""Weights of four bits in the format pack-quantized of compressed-tensors, as of Kimi K2.5.

The format is that of https://github.com/vllm-project/compressed-tensors.
"""

from collections.abc import Mapping, Sequence

import ml_dtypes
import numpy as np

from paxlite.core.errors import UserError, located
from paxlite.core.fields import Fields
from paxlite.core.json_text import Json
from paxlite.weights.known_keys import check_known, shortened

METHOD, PACKED, SCALE, SHAPE = 'compressed-tensors', '_packed', '_scale', '_shape'
_PER_WORD = 8  # numbers of four bits in 32 bits
# What must be said of weights, and what may be said besides, with the values that change nothing.
_WEIGHTS: Mapping[str, Json] = {'num_bits': 4, 'symmetric': True, 'strategy': 'group'}
_NEUTRAL: Mapping[str, Sequence[Json]] = {
  'type': ('int',), 'dynamic': (False,), 'format': ('pack-quantized',),
}  # fmt: skip
# The tensors say which weights are packed; observers have chosen the scales.
_HARMLESS = ('targets', 'observer', 'observer_kwargs', 'scale_dtype', 'zp_dtype')


def group_size(config: Mapping[str, Json]) -> int:
  """Returns how many neighboring weights of an output have one scale.

  Raises UserError if its groups say something that is not supported.

  Args:
    config: The quantization_config of this method.
  """
  whole = Fields(config, 'quantization_config')
  groups = whole.get('config_groups')
  if whole.get('format') != 'pack-quantized' or not isinstance(groups, dict) or len(groups) != 1:
    raise UserError(
      'quantization_config of compressed-tensors must have format pack-quantized, and one group in '
      f'config_groups, not {shortened(groups)}'
    )
  ((name, given),) = groups.items()
  with located('config_groups'):
    group = whole.object(given, name)
    weights = whole.object(group.get('weights'), f'weights of {name}')
    for key, wanted in _WEIGHTS.items():
      if (found := weights.get(key)) != wanted:
        raise UserError(f'{key}={shortened(found)} is not supported')
    size = weights.get('group_size')
    for fields in (group, weights):
      check_known(fields.left(), _HARMLESS, _NEUTRAL)
  if isinstance(size, bool) or not isinstance(size, int) or size <= 0:
    raise UserError(f'group_size={size!r} of config_groups must be an integer above 0')
  return size


def unpacked_shape(
  name: str, packed: Sequence[int], scales: Sequence[int], group: int
) -> tuple[int, ...]:
  """Returns the shape of a weight, [out, in]; raises UserError if its parts do not fit."""
  if len(packed) != 2 or len(scales) != 2 or packed[0] != scales[0]:
    raise UserError(f'{name}{PACKED} is {list(packed)} and {name}{SCALE} is {list(scales)}')
  if packed[1] * _PER_WORD != scales[1] * group:
    raise UserError(
      f'{name}{PACKED} has {packed[1] * _PER_WORD} numbers for each output, and {name}{SCALE} '
      f'{scales[1]} scales of {group} each'
    )
  return packed[0], packed[1] * _PER_WORD


def unpacked(packed: np.ndarray, scales: np.ndarray, group: int) -> np.ndarray:
  """Returns a weight in bfloat16, [out, in].

  Args:
    packed: Eight numbers in each of [out, in / 8], the first in the lowest bits, plus 8 each.
    scales: [out, in / group].
    group: How many neighboring weights have one scale.
  """
  shifts = np.arange(0, 32, 4, dtype=np.uint32)
  numbers = (packed.view(np.uint32)[..., None] >> shifts & 15).astype(np.float32) - 8
  groups = numbers.reshape(*scales.shape, group) * scales.astype(np.float32)[..., None]
  return groups.reshape(len(packed), -1).astype(ml_dtypes.bfloat16)
