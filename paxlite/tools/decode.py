"""paxlite decode RUN [NAME=VALUE …]

Continues the prompts in the file DECODE_FILES with the last good checkpoint of a run.
MAX_DECODE_STEPS and TEMPERATURE, for example, say how.

Examples:
  paxlite decode runs/TinyGPT DECODE_FILES=prompts.jsonl MAX_DECODE_STEPS=20
"""

from collections.abc import Sequence
from typing import NoReturn

from paxlite import main as paxlite_main
from paxlite.cli.run_options import RunParser

PARSER = RunParser(__doc__, 'decode')


def main(argv: Sequence[str]) -> NoReturn:
  paxlite_main.run(argv, PARSER)
