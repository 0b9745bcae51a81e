"""paxlite verify RUN [--from_step=STEP] [--to_step=STEP] [NAME=VALUE …]

Proves that a run did what its program says: replays its steps from one checkpoint to another, and
compares losses, norms of gradients and every number of the last state, bit for bit. A device that
computed wrong, or memory that lost a bit, makes a difference, which is named. On other devices or
another mesh sums have another order; then losses are compared within a tolerance. Nothing is
written, and the exit code is 1 where something differs. docs/verifying.md tells more.

Examples:
  paxlite verify runs/TinyGPT
  paxlite verify runs/TinyGPT --from_step=0 --to_step=100
"""

import functools

from paxlite import main as paxlite_main
from paxlite.cli.run_options import RunParser

PARSER = RunParser(__doc__, 'verify')
main = functools.partial(paxlite_main.run, parser=PARSER)
