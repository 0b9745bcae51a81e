"""The extension for compilation: commands, and step costs in runs and reports."""

from paxlite.core.extension import Command, Extension


def _command(name: str, purpose: str, module: str) -> Command:
  return Command(name, purpose, f'paxlite.aot.commands.{module}', 'Machines')


EXTENSION = Extension(
  'aot',
  needs=('pipeline',),
  commands=(
    _command('plan', 'the fastest mesh and batch that fit a machine', 'plan'),
    _command('compile', 'whether a step fits another machine, and how fast it is', 'compile'),
    _command('explain', "where a step's memory and time go", 'explain'),
  ),
  hooks={'CHECKPOINT_POLICY=AUTO': 'paxlite.aot.planning.recomputation:chosen'},
  callbacks=('paxlite.aot.run_callbacks:callbacks',),
  sections=('paxlite.aot.report_sections:sections',),
)
