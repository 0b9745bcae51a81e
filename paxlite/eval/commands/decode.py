"""paxlite decode RUN [NAME=VALUE …]

Continues the prompts in DECODE_FILES with a run's last good checkpoint. Attributes such as
MAX_DECODE_STEPS and TEMPERATURE control sampling.

Examples:
  paxlite decode runs/TinyGPT DECODE_FILES=prompts.jsonl MAX_DECODE_STEPS=20
"""

import functools

from paxlite import main as paxlite_main
from paxlite.cli.run_options import RunParser

PARSER = RunParser(__doc__, 'decode')
main = functools.partial(paxlite_main.run, parser=PARSER)
