"""paxlite budget RUN

Prints the steps that are left of the budget of a run.

Example:
  paxlite budget runs/mine
"""

import pathlib

from paxlite.cli.parser import Parser, local
from paxlite.tracking.writers import read_records

PARSER = Parser(__doc__)
PARSER.word('run', 'RUN', 'the folder of a run', local)
PARSER.option('--budget', 'STEP_BUDGET', int, default=0)


def main(argv):
  args = PARSER.parsed(argv)
  steps = [record['step'] for record in read_records(pathlib.Path(args.run, 'metrics.jsonl'))]
  print(args.budget - max(steps, default=0))
