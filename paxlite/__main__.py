"""python -m paxlite [--version]

Lists the commands of paxlite.
"""

import sys

import paxlite
from paxlite.core import command_line
from paxlite.tools import __main__ as tools


def main(argv: list[str]) -> int:
  if '--version' in argv:
    print(f'paxlite {paxlite.__version__}')
    return 0
  if {*argv} - {'-h', '--help', '-help'}:
    print(f'error: {argv[0]!r} is no way to run paxlite: see python -m paxlite', file=sys.stderr)
    return 2
  print(f'{paxlite.__doc__}\n')
  print(tools.line('paxlite.main', 'trains, evaluates and decodes; --help lists its flags'))
  print(tools.listing())
  return 0


if __name__ == '__main__':
  exit_code = 0
  with command_line.printing():
    exit_code = main(sys.argv[1:])
  sys.exit(exit_code)
