"""Returns the memory freed by requests to the system, which malloc would keep."""

import ctypes
import threading

_SECONDS = 10.0  # between two looks
_ARENA_MAX = -8  # M_ARENA_MAX of malloc.h
_ARENAS = 2  # each thread that answers a request would have one of its own


def return_regularly() -> None:
  """Begins to return freed memory; does nothing where the C library is not glibc."""
  libc = ctypes.CDLL(None)
  if not hasattr(libc, 'malloc_trim'):
    return
  libc.mallopt(_ARENA_MAX, _ARENAS)

  def run() -> None:
    pause = threading.Event()
    while not pause.wait(_SECONDS):
      libc.malloc_trim(0)

  threading.Thread(target=run, name='freed memory', daemon=True).start()
