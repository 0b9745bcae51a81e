"""What the tools share: overrides, a progress bar, and how they end."""

import argparse
import contextlib
import importlib
import signal
import sys
from collections.abc import Callable, Iterator, Sequence

from paxlite.errors import UserError

BASE_WEIGHTS = 'where the weights are now that LoRA was trained beside, if they were moved'


def run(main: Callable[[Sequence[str]], None]) -> None:
  """Calls `main` with the command line and exits: 0, 2 after a UserError, 130 after Ctrl-C.

  Modules of --import=MODULE are imported before: checkpoints name experiments, and none is imported
  because a file says so.
  """
  # what is unfinished is removed on the way out
  signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
  try:
    main(_import_modules(sys.argv[1:]))
  except UserError as e:
    print(f'error: {str(e).splitlines()[0]}', file=sys.stderr)
    sys.exit(2)
  except KeyboardInterrupt:
    print('interrupted', file=sys.stderr)
    sys.exit(128 + signal.SIGINT)
  except BrokenPipeError:  # `… | head`
    sys.stderr.close()


def _import_modules(argv: Sequence[str]) -> list[str]:
  """Imports what --import=MODULE names; returns the other arguments."""
  for argument in argv:
    if argument.startswith('--import='):
      try:
        importlib.import_module(argument.removeprefix('--import='))
      except (ImportError, ValueError) as e:
        raise UserError(f'{argument}: {e}') from None
  return [a for a in argv if not a.startswith('--import=')]


def parse(
  parser: argparse.ArgumentParser, argv: Sequence[str]
) -> tuple[argparse.Namespace, dict[str, str]]:
  """The parsed arguments, and the text of every --fdl.NAME=text."""
  overrides = [a for a in argv if a.startswith('--fdl.')]
  args = parser.parse_args([a for a in argv if not a.startswith('--fdl.')])
  for argument in overrides:
    if '=' not in argument:
      raise UserError(f'{argument} has no value: write {argument}=VALUE')
  return args, dict(a.removeprefix('--fdl.').partition('=')[::2] for a in overrides)


@contextlib.contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
  """A bar on a terminal, moved by the function of (done, all) that it gives."""
  from rich.console import Console
  from rich.progress import Progress

  console = Console(stderr=True)
  with Progress(console=console, disable=not console.is_terminal) as bar:
    task = bar.add_task(what, total=None)
    yield lambda done, total: bar.update(task, completed=done, total=total)
