"""What the doctor adds: its command."""

from paxlite.core.extension import Command, Extension

_PURPOSE = 'what is installed, what is missing, and what to do'
EXTENSION = Extension(
  'doctor',
  commands=(Command('doctor', _PURPOSE, 'paxlite.doctor.command', 'Machines'),),
  former_modules={
    'paxlite.programs.kernel_check': 'paxlite.doctor.kernel_check',
    'paxlite.tools.doctor': 'paxlite.doctor.command',
  },
)
