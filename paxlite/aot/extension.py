"""What compilation for other machines adds: commands, and what runs and reports say of a step."""

from paxlite.core.extension import Command, Extension


def _command(name: str, purpose: str, module: str) -> Command:
  return Command(name, purpose, f'paxlite.aot.commands.{module}', 'Machines')


EXTENSION = Extension(
  'aot',
  needs=('pipeline',),
  commands=(
    _command('plan', 'the fastest mesh and batch that fit a machine', 'plan'),
    _command('compile', 'does it fit, and how fast, on a machine that is not here', 'compile'),
    _command('explain', 'where the memory and the time of a step go', 'explain'),
  ),
  callbacks=('paxlite.aot.run_callbacks:callbacks',),
  sections=('paxlite.aot.report_sections:sections',),
)
