"""paxlite diff A B [NAME=VALUE …]

Prints the lines in which two experiments' values and built configs differ. NAME=VALUE sets an
attribute of both.

Example:
  paxlite diff GPT126M GPT5B
"""

import difflib
import os
from collections.abc import Sequence

from paxlite.cli.parser import Parser, experiment_name
from paxlite.core.errors import UserError
from paxlite.tools import show

PARSER = Parser(__doc__)
PARSER.word('a', 'A', 'experiment', experiment_name)
PARSER.word('b', 'B', 'experiment to compare with', experiment_name)
PARSER.attributes()


def main(argv: Sequence[str]) -> None:
  args = PARSER.parsed(argv)
  if all(os.path.isdir(name) for name in (args.a, args.b)):
    raise UserError(
      f'{args.a} and {args.b} are folders: `paxlite report {args.a} {args.b}` shows where two runs '
      f'differ, and `paxlite bisect {args.a} {args.b}` the first step that does'
    )
  a, b = (show.text(name, args.attributes).splitlines() for name in (args.a, args.b))
  for line in difflib.unified_diff(a, b, args.a, args.b, lineterm='', n=0):
    if not line.startswith('@@'):
      print(line)
