"""Processes that end with the one that started them, and take with them what they have started."""

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def kill_group(pid: int) -> None:
  """Kills a process that was started in a new session, and all that belong to its group.

  It waits for none of them: whoever reads from them finds the end of their output.
  """
  with contextlib.suppress(ProcessLookupError, PermissionError):
    os.killpg(pid, signal.SIGKILL)


def end_group_with_parent() -> None:
  """Lets this process, the first one of its group, end with its group when its parent is gone."""
  parent = os.getppid()

  def watch() -> None:
    while os.getppid() == parent:
      time.sleep(1)
    os.killpg(0, signal.SIGKILL)

  threading.Thread(target=watch, daemon=True).start()


def terminated_with_parent() -> Callable[[], None] | None:
  """Returns a `preexec_fn` of subprocess; the process gets SIGTERM when its parent is gone.

  Returns None where the kernel is not Linux. The thread that starts the process must be the main
  one: the signal is sent when that thread ends.
  """
  prctl = getattr(ctypes.CDLL(None), 'prctl', None)
  return None if prctl is None else lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
