"""The last line of a terminal, which changes while a program works, and the lines above it.

Where standard output is not a terminal, no line changes: what takes long is printed once.
"""

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from paxlite.core.errors import doing

if TYPE_CHECKING:
  from rich.live import Live
  from rich.text import Text

_PATIENCE = 10.0  # seconds of silence after which work is reported where there is no live line
_live: 'Live | None' = None  # rich's display of the line
_line = ''
_works: list[tuple[str, float]] = []  # what the program works at, and since when


def is_possible() -> bool:
  """Whether standard output is a terminal."""
  return sys.stdout is not None and not sys.stdout.closed and sys.stdout.isatty()


def show(text: str) -> bool:
  """Shows a text in the live line; returns False if there is no terminal."""
  global _line
  if not is_possible():
    return False
  _line = text
  return _apply(lambda live: live.refresh())


def cut(text: str) -> str:
  """Returns a line of a step as it fits into the terminal; the whole text where there is none."""
  width = shutil.get_terminal_size().columns if is_possible() else len(text)
  return text if len(text) <= width else f'{text[: width - 1]}…'


def print_above(text: str) -> bool:
  """Prints a line that stays, above the live line; returns False if there is no live line."""
  if _live is None:
    return False
  return _apply(lambda live: live.console.print(text, highlight=False, markup=False))


def close() -> None:
  """Removes the live line."""
  global _live, _line
  live, _live = _live, None
  if live is not None:
    with contextlib.suppress(OSError, ValueError):
      live.stop()
  _line = ''


@contextlib.contextmanager
def working(what: str, say: Callable[[str], None]) -> Iterator[Callable[[str], None]]:
  """A context that shows what takes long, with the time that it has taken.

  Args:
    what: The work, such as 'Compiling the train step'.
    say: Prints a line where there is no terminal. It is called at most once, after ten seconds.

  Yields:
    A function that is called with the progress, such as 'batch 3 of 40'.
  """
  begun = time.monotonic()
  entry = [what]
  late = threading.Timer(_PATIENCE, lambda: say(f'{entry[0]} …'))
  late.daemon = True
  alone = _live is None  # nothing else shows the line, so that it goes when the work is done

  def progress(text: str) -> None:
    entry[0] = f'{what}: {text}'
    if _works:
      _works[-1] = entry[0], begun

  if is_possible():
    _works.append((what, begun))
    _apply(lambda live: live.refresh())
  else:
    late.start()
  try:
    with doing(what):
      yield progress
  finally:
    late.cancel()
    if _works:
      _works.pop()
    if alone and not _line:
      close()


class _Line:
  """The renderable for rich: the live line or current work, cut at the terminal's edge."""

  def __rich__(self) -> 'Text':
    from rich.text import Text

    parts = [_line] if _line else []
    if _works:
      what, begun = _works[-1]
      seconds = time.monotonic() - begun
      parts.insert(0, f'{what} … {seconds:.0f} s' if seconds >= 1 else f'{what} …')
    return Text('  '.join(parts), no_wrap=True, overflow='ellipsis')


def _apply(act: Callable[['Live'], None]) -> bool:
  """Applies `act` to the display; returns False if there is none, or if it has just failed."""
  global _live
  try:
    if _live is None:
      from rich.live import Live

      # what goes to another file or pipe stays there
      to_screen = sys.stderr is not None and sys.stderr.isatty()
      _live = Live(_Line(), refresh_per_second=2, transient=True, redirect_stderr=to_screen)
      _live.start()
    act(_live)
  except (OSError, ValueError):  # ValueError: the terminal's encoding lacks a character
    close()
    return False
  return True
