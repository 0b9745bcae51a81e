"""paxlite goodput RUN

Prints the share of a run's wall time spent in steps that count, over all restarts, and where the
rest went.

Example:
  paxlite goodput runs/demo
"""

from collections.abc import Sequence

from paxlite.cli.parser import Parser, stored
from paxlite.core.errors import UserError
from paxlite.files.schemes import records_of
from paxlite.training import goodput

PARSER = Parser(__doc__)
PARSER.option('job_log_dir', 'run folder', stored)


def main(argv: Sequence[str]) -> None:
  given = PARSER.parsed(argv).job_log_dir
  folder = records_of(given)
  report = goodput.report(folder)
  if report is None:
    raise UserError(f'{given} holds no run that was trained')
  print(report.table())
