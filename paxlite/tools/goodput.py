"""python -m paxlite.tools.goodput JOB_LOG_DIR

The share of a run's wall time in steps that count, over all of its restarts; and where the rest
went.
"""

import argparse
import pathlib
from collections.abc import Sequence

from paxlite import goodput
from paxlite.errors import UserError
from paxlite.tools import cli


def main(argv: Sequence[str]) -> None:
  parser = argparse.ArgumentParser(
    prog='python -m paxlite.tools.goodput',
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument('job_log_dir', help='of the run')
  folder = pathlib.Path(cli.parse_args(parser, argv).job_log_dir)
  report = goodput.report(folder)
  if report is None:
    raise UserError(f'{folder} holds no run that was trained')
  print(report.table())


if __name__ == '__main__':
  cli.run(main)
