"""paxlite eval RUN [--before] [NAME=VALUE …]

Evaluates the last good checkpoint of a run on its held-out data, with the settings of the run, and
on the zero-shot tasks of EVAL_TASKS. RUN may also be an experiment that starts from published
weights. `paxlite zero-shot WEIGHTS --tasks=TASK.json` evaluates imported weights on a task.

Examples:
  paxlite eval runs/TinyGPT
  paxlite eval runs/TinyGPT EVAL_BATCH_SIZE=8
"""

import functools

from paxlite import main as paxlite_main
from paxlite.cli.run_options import RunParser

PARSER = RunParser(__doc__, 'eval')
main = functools.partial(paxlite_main.run, parser=PARSER)
