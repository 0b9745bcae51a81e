"""paxlite chat CHECKPOINT [--prompt=TEXT] [--system=TEXT] [NAME=VALUE …]

Asks for one message after another and answers by the chat template of the model, or answers TEXT
alone. CHECKPOINT is the folder of a run or of imported weights. Ctrl-D ends it.

Example:
  paxlite chat weights/smollm --system="Answer in one sentence."
"""

from collections.abc import Sequence

from paxlite.core import command_line
from paxlite.tools import generate


def main(argv: Sequence[str]) -> None:
  generate.main(['--chat', *argv], __doc__)


if __name__ == '__main__':
  command_line.run(main)
