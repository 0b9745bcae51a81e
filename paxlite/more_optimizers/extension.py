"""The extension for more optimizers: names for OPTIMIZER, their attributes, and QK-clip."""

from paxlite.core.extension import Extension

_NAMES = 'soap', 'lion', 'sgd', 'adafactor', 'schedule_free'
EXTENSION = Extension(
  'more_optimizers',
  optimizers=tuple(f'paxlite.more_optimizers.by_name:{name}' for name in _NAMES),
  options={'paxlite.more_optimizers.qk_clip:QkClip': ('QK_CLIP',)},
  former_modules={'paxlite.optim.soap': 'paxlite.more_optimizers.soap'},
)
