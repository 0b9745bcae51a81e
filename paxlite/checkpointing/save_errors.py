"""A save that fails is logged in one line of our own; the lines of libraries are left out."""

import atexit
import contextlib
import errno
import logging
import os
import sys
import warnings
from typing import Any

_noted = False
_NO_SPACE = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))


def quieten() -> None:
  """Keeps what Orbax leaves behind when a save fails off the terminal.

  It closes its event loop while TensorStore still has results for it. Each of hundreds of
  them would print a traceback, as would each write that nobody waits for any more.
  """
  logging.getLogger('asyncio').setLevel(logging.CRITICAL)
  before = sys.unraisablehook
  if getattr(before, 'leaves_out_closed_loops', False):
    return

  def hook(unraisable: Any) -> None:
    error = unraisable.exc_value
    if not (isinstance(error, RuntimeError) and str(error) == 'Event loop is closed'):
      before(unraisable)

  hook.leaves_out_closed_loops = True  # type: ignore[attr-defined]
  sys.unraisablehook = hook
  warnings.filterwarnings('ignore', 'coroutine .* was never awaited', RuntimeWarning)


def reason(error: Exception, folder: str | os.PathLike) -> str:
  """Why a save below `folder` failed, in a line; without the names of a dozen files inside."""
  text = str(error)
  for no_space in _NO_SPACE:
    if no_space in text:
      return f'{no_space} ({os.fspath(folder)})'
  return f'{type(error).__name__}: {text}'.splitlines()[0]


def note() -> None:
  """Notes that a save has failed: Orbax's threads may wait for minutes for others of theirs."""
  global _noted
  _noted = True


def end(code: int) -> None:
  """Ends the process with an exit code; where a save has failed, without waiting for threads."""
  if not _noted:
    sys.exit(code)
  atexit._run_exitfuncs()
  for stream in (sys.stdout, sys.stderr):
    with contextlib.suppress(OSError, ValueError, AttributeError):  # it is closed, or there is none
      stream.flush()
  os._exit(code)
