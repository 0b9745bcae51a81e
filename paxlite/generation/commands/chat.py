"""paxlite chat CHECKPOINT [--prompt=TEXT] [--system=TEXT] [NAME=VALUE …]

Asks for one message after another and answers by the chat template of the model, or answers TEXT
alone. CHECKPOINT is the folder of a run or of imported weights. exit or Ctrl-D ends it.

Example:
  paxlite chat weights/smollm --system="Answer in one sentence."
"""

from collections.abc import Sequence

from paxlite.cli.parser import Parser, stored
from paxlite.generation.commands import generate

PARSER = Parser(__doc__)
PARSER.word('checkpoint', 'CHECKPOINT', 'a job_log_dir, or imported weights', stored)
PARSER.word('prompt', 'TEXT', 'a message to answer; without it you are asked', required=False)
PARSER.set_defaults(chat=True)
generate.add_options(PARSER)


def main(argv: Sequence[str]) -> None:
  generate.answer(PARSER.parsed(argv))
