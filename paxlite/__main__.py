"""paxlite COMMAND [ARGUMENTS]

Trains language models. `paxlite COMMAND --help` explains a command, `paxlite --version` prints the
version, and `python -m paxlite COMMAND` is the same as `paxlite COMMAND`.
"""

import contextlib
import sys
from collections.abc import Sequence

import paxlite
from paxlite.cli import command_line
from paxlite.cli.parser import HELP
from paxlite.core.errors import UserError
from paxlite.core.near_names import did_you_mean
from paxlite.extensions import missing
from paxlite.tools.commands import commands, find, listing

_EXAMPLES = """
Examples:
  paxlite train TinyGPT --folder=logs/tiny NUM_LAYERS=6
  paxlite eval logs/tiny
  paxlite list llama
"""


def main() -> None:
  """Runs the command that the command line names, and ends the process with its exit code."""
  command = None
  with contextlib.suppress(UserError):  # of an extension; _run raises it again, to be reported
    command = find(sys.argv[1]) if sys.argv[1:] else None
  if command is not None and command.is_run:
    command.main(sys.argv[2:])
  else:
    command_line.run(_run)


def _run(argv: Sequence[str]) -> None:
  if '--version' in argv[:1]:
    print(f'paxlite {paxlite.__version__}')
  elif not argv or argv[0] in (*HELP, 'help'):
    print(f'{__doc__.strip()}\n\n{listing()}\n{_EXAMPLES.rstrip()}')
  elif command := find(argv[0]):
    command.main(argv[1:])
  elif absent := missing(argv[0]):
    raise UserError(f'paxlite {absent}')
  else:
    meant = did_you_mean(argv[0], commands(), cutoff=0.6, prefix='paxlite ')
    hint = ' '.join(filter(None, [meant, 'paxlite --help lists the commands']))
    raise UserError(f'{argv[0]!r} is not a command. {hint}')


if __name__ == '__main__':
  main()
