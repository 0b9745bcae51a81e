"""paxlite goodput RUN

The share of a run's wall time spent in steps that count, over all restarts. The table also shows
where the rest of the time went.

Example:
  paxlite goodput runs/demo
"""

from collections.abc import Sequence

from paxlite.checkpointing.stored_source import folder_of
from paxlite.cli import command_line
from paxlite.core.errors import UserError
from paxlite.training import goodput


def main(argv: Sequence[str]) -> None:
  parser = command_line.Parser(__doc__)
  parser.add_argument('job_log_dir', help='of the run')
  given = command_line.parse_args(parser, argv).job_log_dir
  folder = folder_of(given)
  report = goodput.report(folder)
  if report is None:
    raise UserError(f'{given} holds no run that was trained')
  print(report.table())


if __name__ == '__main__':
  command_line.run(main)
