"""The extension for Transformer Engine: USE_TE, and the command that converts weights."""

from paxlite.core.extension import Command, Extension

_HERE = 'paxlite.transformer_engine'
_PURPOSE = "convert to and from Transformer Engine's layers"
EXTENSION = Extension(
  'transformer_engine',
  needs=('weights',),
  commands=(Command('convert-te', _PURPOSE, f'{_HERE}.command', 'Models'),),
  hooks={'USE_TE': f'{_HERE}.templates:complete'},
  former_modules={
    'paxlite.experiments.parts.te_layer': f'{_HERE}.templates',
    'paxlite.layers.te_layer': f'{_HERE}.layer',
    'paxlite.tools.convert_te': f'{_HERE}.command',
    'paxlite.weights.te': f'{_HERE}.conversion',
  },
)
