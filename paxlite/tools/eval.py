"""paxlite eval RUN [--before] [NAME=VALUE …]

Evaluates a run's last good checkpoint on its held-out data and on EVAL_TASKS, with the run's
settings. RUN may also be an experiment that starts from published weights. `paxlite zero-shot`
evaluates imported weights.

Examples:
  paxlite eval runs/TinyGPT
  paxlite eval runs/TinyGPT EVAL_BATCH_SIZE=8
"""

import functools

from paxlite import main as paxlite_main
from paxlite.cli.run_options import RunParser

PARSER = RunParser(__doc__, 'eval')
main = functools.partial(paxlite_main.run, parser=PARSER)
