"""What the ladder adds: its command."""

from paxlite.core.extension import Command, Extension

_PURPOSE = 'predict its loss by small models of its kind'
EXTENSION = Extension(
  'ladder',
  needs=('report',),  # whose curves it draws
  commands=(Command('ladder', _PURPOSE, 'paxlite.ladder.command', 'Experiments'),),
)
