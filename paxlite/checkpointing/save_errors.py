"""Reports a failed save in one line, and suppresses what libraries print about it."""

import atexit
import contextlib
import logging
import os
import sys
import warnings
from typing import NoReturn

from paxlite.core.errors import NO_SPACE

_noted = False
_NO_SPACE = tuple(map(os.strerror, NO_SPACE))


def quieten() -> None:
  """Keeps the errors that Orbax leaves behind after a failed save off the terminal.

  Orbax closes its event loop while TensorStore still has results for it. Each of these hundreds of
  results would print a traceback, and so would each write that is no longer awaited.
  """
  logging.getLogger('asyncio').setLevel(logging.CRITICAL)
  before = sys.unraisablehook
  if getattr(before, 'leaves_out_closed_loops', False):
    return

  def hook(unraisable: 'sys.UnraisableHookArgs') -> None:
    error = unraisable.exc_value
    if not (isinstance(error, RuntimeError) and str(error) == 'Event loop is closed'):
      before(unraisable)

  hook.leaves_out_closed_loops = True  # type: ignore[attr-defined]
  sys.unraisablehook = hook
  warnings.filterwarnings('ignore', 'coroutine .* was never awaited', RuntimeWarning)


def reason(error: Exception, folder: str | os.PathLike) -> str:
  """Returns in one line why a save below `folder` failed, without the names of all its files."""
  text = str(error)
  for no_space in _NO_SPACE:
    if no_space in text:
      return f'{no_space} ({os.fspath(folder)})'
  return f'{type(error).__name__}: {text}'.splitlines()[0]


def note() -> None:
  """Notes that a save failed; Orbax's threads may then wait for each other for minutes."""
  global _noted
  _noted = True


def end(code: int) -> NoReturn:
  """Ends the process with an exit code; after a failed save, without waiting for threads."""
  if not _noted:
    sys.exit(code)
  atexit._run_exitfuncs()
  for stream in (sys.stdout, sys.stderr):
    with contextlib.suppress(OSError, ValueError, AttributeError):  # It is closed or None.
      stream.flush()
  os._exit(code)
