"""Signals that ask a run to leave: SIGTERM, SIGINT and SIGHUP.

SIGTERM comes from Slurm before a time limit, from Kubernetes and from the host of a spot instance;
SIGINT is Ctrl-C; SIGHUP says that the terminal is gone. A run of one process notes them here. JAX's
preemption service notes SIGTERM for several, and makes all of them leave before the same step,
whichever was asked; the other two are passed on to it.

Python calls its handlers between two instructions of the main thread, which may wait for the device
for a whole step. A thread therefore hears the signal at once, says so, and ends the process where a
second one asks for that.
"""

import _thread
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from paxlite.core.errors import EXIT_AGAIN, Interrupted
from paxlite.core.terminal import say, warn

# Seconds after the first signal from which another one is a second one. Two presses of a hand are
# at least 0.1 s apart; a process group, `timeout` or a child that was forked repeat a signal within
# milliseconds. Slurm sends SIGTERM twice at a time limit, and a session that ends sends SIGHUP to
# whatever is left of it.
_SECOND_AFTER = {signal.SIGINT: 0.1, signal.SIGTERM: 2.0, signal.SIGHUP: float('inf')}
_STOP = 0  # no signal has this number
_SHOW_CURSOR = '\x1b[?25h'  # a line that renews itself has hidden it

_listener: '_Listener | None' = None


@contextlib.contextmanager
def listening(saves: bool = True, owner: bool = False) -> Iterator[None]:
  """A context in which a first signal is noted; a second one ends the process at once.

  Handlers are as before when it ends. It does nothing inside of another one, and outside of the
  main thread, which alone can have handlers.

  Args:
    saves: Whether the run writes a checkpoint when it leaves, for the words.
    owner: Whether the process has nothing else to do. Where it has (a notebook), a second Ctrl-C
      raises KeyboardInterrupt instead.
  """
  global _listener
  if _listener is not None or threading.current_thread() is not threading.main_thread():
    yield
    return
  _listener = _Listener(saves, owner)
  try:
    with _listener:
      yield
  finally:
    _listener = None


def asked() -> bool:
  """Whether there was a signal. It needs no JAX, which may not be imported yet."""
  return _listener is not None and _listener.asked


def check() -> None:
  """Raises Interrupted where there was a signal already and nothing is there to be saved.

  One of several processes ends at once: the others do not know, until they notice that.
  """
  import jax

  if _listener is None or not _listener.asked:
    return
  message = 'asked to leave before the first step: nothing was lost'
  if jax.process_count() > 1:
    warn(f'interrupted: {message}')
    os._exit(EXIT_AGAIN)
  raise Interrupted(message)


def reached(step: int, last: int) -> bool:
  """Whether to save and leave before `step`; every process calls this before each step.

  Args:
    step: Steps that were started.
    last: Steps of the whole run, for the words.
  """
  import jax
  from jax.experimental import multihost_utils

  if _listener is not None:
    _listener.step = min(step + 1, last)
  if jax.process_count() > 1:
    return multihost_utils.reached_preemption_sync_point(step)
  return _listener is not None and _listener.asked


class _Listener:
  """Hears signals in a thread of its own, by the file that Python's C handler writes to.

  Attributes:
    asked: Whether a signal came.
    step: The step after which the run would leave; None before it trains.
  """

  def __init__(self, saves: bool, owner: bool):
    self.asked = False
    self.step: int | None = None
    self._saves = saves
    self._owner = owner
    self._interrupted = False
    self._first = float('inf')
    self._before: dict[int, Any] = {}
    self._thread = threading.Thread(target=self._listen, name='signals', daemon=True)

  def __enter__(self) -> None:
    self._reader, self._writer = os.pipe()
    os.set_blocking(self._writer, False)
    self._fd_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
    self._thread.start()
    for number in _SECOND_AFTER:
      if number == signal.SIGTERM and _several_processes():
        continue  # JAX's service has it
      if number != signal.SIGTERM and signal.getsignal(number) == signal.SIG_IGN:
        continue  # nohup; a script's command in the background, which Ctrl-C is not for
      self._before[number] = signal.signal(number, self._note)

  def __exit__(self, *error: object) -> None:
    for number, handler in self._before.items():
      signal.signal(number, signal.SIG_DFL if handler is None else handler)
    signal.set_wakeup_fd(self._fd_before)
    os.write(self._writer, bytes([_STOP]))
    self._thread.join()
    os.close(self._reader)
    os.close(self._writer)

  def _note(self, number: int, frame: Any) -> None:
    """Python's handler, in the main thread: what it notes is known to its next instruction."""
    self.asked = True
    if self._interrupted:
      self._interrupted = False  # once; what then saves or closes is not disturbed
      raise KeyboardInterrupt

  def _listen(self) -> None:
    while True:
      for number in os.read(self._reader, 64):
        if number == _STOP:
          return
        if number in self._before:
          self._hear(signal.Signals(number))

  def _hear(self, number: signal.Signals) -> None:
    now = time.monotonic()
    if self._first == float('inf'):
      self._first = now
      self.asked = True
      warn(f'Received {number.name}: {self._answer(number)}')
      if number != signal.SIGTERM and _several_processes():
        os.kill(os.getpid(), signal.SIGTERM)
    elif now - self._first > _SECOND_AFTER[number] and not self._interrupted:
      warn(f'Received {number.name} again: leaving at once, without saving')
      self._leave(number)

  def _answer(self, number: signal.Signals) -> str:
    if self.step is None:
      answer = 'leaving before the first step'
    elif not self._saves:
      answer = f'leaving after step {self.step:,}, without saving'
    elif _several_processes():
      answer = 'saving after a step that all processes agree on'
    else:
      answer = f'saving after step {self.step:,}'
    again = {signal.SIGINT: 'press Ctrl-C again', signal.SIGTERM: 'send it again'}
    if number not in again:
      return answer
    return f'{answer}; {again[number]} to quit {"without saving" if self.step else "at once"}'

  def _leave(self, number: signal.Signals) -> None:
    if number == signal.SIGINT and not self._owner:
      self._interrupted = True
      _thread.interrupt_main(number)  # which calls the handler once more
      return
    if sys.stdout is not None and sys.stdout.isatty():
      say(_SHOW_CURSOR)
    os._exit(128 + number)  # as a shell reports it


def _several_processes() -> bool:
  """Whether this process is one of several. It does not import JAX."""
  distributed = getattr(sys.modules.get('jax'), 'distributed', None)
  return distributed is not None and distributed.is_initialized()
