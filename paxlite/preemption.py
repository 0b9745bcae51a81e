"""SIGTERM: from Slurm before a time limit, from Kubernetes, from the host of a spot instance.

A run of one process notes the signal here. JAX's preemption service notes it for several, and tells
all of them to leave before the same step, whichever was asked. Ctrl-C asks for the same.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

from paxlite.errors import EXIT_AGAIN, Interrupted

_REPEATED_SECONDS = 2  # Slurm sends the same one twice at a time limit
_asked: list[float] = []  # when; signals come to the process, whatever object is looking


@contextlib.contextmanager
def listening() -> Iterator[None]:
  """A context in which a first signal is noted; one that comes later ends the process."""
  _asked.clear()
  before = {
    signal.SIGTERM: signal.signal(signal.SIGTERM, _note),
    signal.SIGINT: signal.signal(signal.SIGINT, _pass_on),
  }
  try:
    yield
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)


def _note(number: int, frame: Any) -> None:
  now = time.monotonic()
  if _asked and now - _asked[0] > _REPEATED_SECONDS:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
  _asked.append(now)


def _pass_on(number: int, frame: Any) -> None:
  """Ctrl-C as SIGTERM, which the service of several processes listens to."""
  os.kill(os.getpid(), signal.SIGTERM)


def check() -> None:
  """Raises Interrupted where there was a signal already and nothing is there to be saved.

  One of several processes ends at once: the others do not know, until they notice that.
  """
  import jax

  if not _asked:
    return
  message = 'asked to leave before the first step: nothing was lost'
  if jax.process_count() > 1:
    print(f'interrupted: {message}', file=sys.stderr, flush=True)
    os._exit(EXIT_AGAIN)
  raise Interrupted(message)


def reached(step: int) -> bool:
  """Whether to save and leave before `step`; to be asked before each one, by every process."""
  import jax
  from jax.experimental import multihost_utils

  if jax.process_count() > 1:
    return multihost_utils.reached_preemption_sync_point(step)
  return bool(_asked)
