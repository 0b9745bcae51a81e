"""paxlite verify RUN [--from_step=STEP] [--to_step=STEP] [NAME=VALUE …]

Replays a run's steps from one checkpoint to another and compares losses, gradient norms and every
number of the final state bit for bit, which proves that the run did what its program says. Names
any difference, such as from a faulty device or memory. On other devices or another mesh, sums have
another order, so losses are compared within a tolerance. Writes nothing. Exits with 1 if something
differs. See docs/verifying.md.

Examples:
  paxlite verify runs/TinyGPT
  paxlite verify runs/TinyGPT --from_step=0 --to_step=100
"""

import functools

from paxlite import main as paxlite_main
from paxlite.cli.run_options import RunParser

PARSER = RunParser(__doc__, 'verify')
main = functools.partial(paxlite_main.run, parser=PARSER)
