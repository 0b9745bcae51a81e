"""The extension for more optimizers: names for OPTIMIZER, and their attributes."""

from paxlite.core.extension import Extension

_NAMES = 'soap', 'lion', 'sgd', 'adafactor', 'schedule_free'
EXTENSION = Extension(
  'more_optimizers',
  optimizers=tuple(f'paxlite.more_optimizers.by_name:{name}' for name in _NAMES),
  former_modules={'paxlite.optim.soap': 'paxlite.more_optimizers.soap'},
)
