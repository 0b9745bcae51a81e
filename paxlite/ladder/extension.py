"""The extension for the command ladder."""

from paxlite.core.extension import Command, Extension

_PURPOSE = 'predict a loss from small models'
EXTENSION = Extension(
  'ladder',
  needs=('report',),  # whose curves it draws
  commands=(Command('ladder', _PURPOSE, 'paxlite.ladder.command', 'Experiments'),),
)
