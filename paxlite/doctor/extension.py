"""The extension for the command doctor."""

from paxlite.core.extension import Command, Extension

_PURPOSE = 'what is installed, what is missing, and how to fix it'
EXTENSION = Extension(
  'doctor',
  commands=(Command('doctor', _PURPOSE, 'paxlite.doctor.command', 'Machines'),),
  former_modules={
    'paxlite.programs.kernel_check': 'paxlite.doctor.kernel_check',
    'paxlite.tools.doctor': 'paxlite.doctor.command',
  },
)
