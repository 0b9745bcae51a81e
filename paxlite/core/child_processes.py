"""Processes that end with the one that started them, and take with them what they have started."""

import contextlib
import ctypes
import os
import signal
import threading
import time

_PR_SET_PDEATHSIG = 1
_PARENT = 'PAXLITE_PARENT'  # a variable of the environment


def kill_group(leader: int) -> None:
  """Kills a process that was started in a new session, and all that belong to its group.

  It waits for none of them: whoever reads from them finds the end of their output.

  Args:
    leader: The number of that process.
  """
  with contextlib.suppress(ProcessLookupError, PermissionError):
    os.killpg(leader, signal.SIGKILL)


def end_group_with_parent() -> None:
  """Lets this process, the first one of its group, end with its group when its parent is gone."""
  parent = os.getppid()

  def watch() -> None:
    while os.getppid() == parent:
      time.sleep(1)
    os.killpg(0, signal.SIGKILL)

  threading.Thread(target=watch, daemon=True).start()


def terminated_with_parent() -> dict[str, str]:
  """Returns variables with which a run of paxlite gets SIGTERM when this process is gone.

  The main thread has to start the run: the kernel sends the signal when that thread ends.
  """
  return {_PARENT: str(os.getpid())}


def obey_parent() -> None:
  """Does in a run what `terminated_with_parent` asks for, if it does; on Linux alone."""
  parent = os.environ.pop(_PARENT, '')
  prctl = getattr(ctypes.CDLL(None), 'prctl', None)
  if not parent or prctl is None:
    return
  prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
  if str(os.getppid()) != parent:  # it is gone already
    os.kill(os.getpid(), signal.SIGTERM)
