"""The extension for the command serve."""

from paxlite.core.extension import Command, Extension

_PURPOSE = "serve OpenAI's API"
EXTENSION = Extension(
  'serving',
  needs=('generation',),
  commands=(Command('serve', _PURPOSE, 'paxlite.serving.command', 'Models'),),
  former_modules={'paxlite.tools.serve': 'paxlite.serving.command'},
)
