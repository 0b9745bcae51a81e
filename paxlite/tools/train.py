"""paxlite train EXPERIMENT [--folder=FOLDER] [NAME=VALUE …]

Trains an experiment to its last step, or continues its unfinished run in FOLDER from the last
checkpoint. Ctrl-C saves and ends; the same command continues.

Examples:
  paxlite train TinyGPT
  paxlite train TinyGPT --folder=runs/wide MODEL_DIMS=256 MAX_STEPS=100
  paxlite train GPT126M --dry_run
"""

import functools

from paxlite import main as paxlite_main
from paxlite.cli.run_options import RunParser

PARSER = RunParser(__doc__, 'train')
main = functools.partial(paxlite_main.run, parser=PARSER)
