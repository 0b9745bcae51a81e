"""What serving adds: its command."""

from paxlite.core.extension import Command, Extension

_PURPOSE = "answer requests in the form of OpenAI's API"
EXTENSION = Extension(
  'serving',
  needs=('generation',),
  commands=(Command('serve', _PURPOSE, 'paxlite.serving.command', 'Models'),),
  former_modules={'paxlite.tools.serve': 'paxlite.serving.command'},
)
