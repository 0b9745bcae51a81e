"""paxlite chat CHECKPOINT [--prompt=TEXT] [--system=TEXT] [NAME=VALUE …]

Chats with a model through its chat template, or answers TEXT alone. CHECKPOINT is a run folder or
imported weights. exit or Ctrl-D ends.

Example:
  paxlite chat weights/smollm --system="Answer in one sentence."
"""

from collections.abc import Sequence

from paxlite.cli.parser import Parser, stored
from paxlite.generation.commands import generate

PARSER = Parser(__doc__)
PARSER.word('checkpoint', 'CHECKPOINT', 'run folder, or imported weights', stored)
PARSER.word('prompt', 'TEXT', 'message to answer; omit it to chat', required=False)
PARSER.set_defaults(chat=True)
generate.add_options(PARSER)


def main(argv: Sequence[str]) -> None:
  generate.answer(PARSER.parsed(argv))
