"""paxlite diff A B [NAME=VALUE …]

Prints the lines in which two experiments differ: their values, and the configs that are built from
them. NAME=VALUE sets an attribute of both.

Example:
  paxlite diff GPT126M GPT5B
"""

import difflib
from collections.abc import Sequence

from paxlite.cli import command_line
from paxlite.tools import show


def main(argv: Sequence[str]) -> None:
  parser = command_line.Parser(__doc__)
  parser.word('a', 'A', 'an experiment')
  parser.word('b', 'B', 'the experiment to compare it with')
  args, overrides = command_line.parse(parser, argv)
  a, b = (show.text(name, overrides).splitlines() for name in (args.a, args.b))
  for line in difflib.unified_diff(a, b, args.a, args.b, lineterm='', n=0):
    if not line.startswith('@@'):
      print(line)


if __name__ == '__main__':
  command_line.run(main)
