"""What compilation for other machines adds: its commands."""

from paxlite.core.extension import Command, Extension


def _command(name: str, purpose: str, module: str) -> Command:
  return Command(name, purpose, f'paxlite.tools.{module}', 'Machines')


EXTENSION = Extension(
  'aot',
  commands=(
    _command('plan', 'the fastest mesh and batch that fit a machine', 'plan'),
    _command('compile', 'does it fit, and how fast, on a machine that is not here', 'compile'),
    _command('explain', 'every array, collective and recomputed product of a step', 'explain'),
    _command('read-hlo', 'the costs of any compiled program', 'read_hlo'),
  ),
)
