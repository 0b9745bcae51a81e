"""The extension for the commands of reports."""

from paxlite.core.extension import Command, Extension


def _command(name: str, purpose: str, group: str) -> Command:
  return Command(name, purpose, f'paxlite.report.commands.{name}', group)


EXTENSION = Extension(
  'report',
  needs=('run_data',),
  commands=(
    _command('report', 'one page about runs: curves, tables, samples', 'Runs'),
    _command('goodput', "what a run's time was spent on, over all restarts", 'Runs'),
    _command('diff', 'where two experiments differ', 'Experiments'),
  ),
  former_modules={'paxlite.tools.report_page': 'paxlite.report'},
)
