"""paxlite chat CHECKPOINT [--prompt=TEXT] [--system=TEXT] [NAME=VALUE …]

Asks for one message after another and answers by the chat template of the model, or answers TEXT
alone. CHECKPOINT is the folder of a run or of imported weights. Ctrl-D ends it.

Example:
  paxlite chat weights/smollm --system="Answer in one sentence."
"""

from collections.abc import Sequence

from paxlite.cli import command_line
from paxlite.tools import generate


def main(argv: Sequence[str]) -> None:
  parser = command_line.Parser(__doc__)
  parser.word('checkpoint', 'CHECKPOINT', 'a job_log_dir, or imported weights')
  parser.word('prompt', 'TEXT', 'a message to answer; without it you are asked', required=False)
  parser.set_defaults(chat=True)
  generate.answer(parser, argv)


if __name__ == '__main__':
  command_line.run(main)
