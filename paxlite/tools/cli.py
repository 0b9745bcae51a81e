"""How every tool ends: its exit code, or one line that says what is wrong."""

import sys
from collections.abc import Callable, Sequence

from paxlite.errors import UserError


def run(main: Callable[[Sequence[str]], None]) -> None:
  """Calls `main` with the command line and exits: 0, or 2 after a UserError."""
  try:
    main(sys.argv[1:])
  except UserError as e:
    print(f'error: {e}', file=sys.stderr)
    sys.exit(2)
  except BrokenPipeError:  # `… | head`
    sys.stderr.close()
