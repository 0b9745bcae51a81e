"""Signals that ask a run to leave: SIGTERM, SIGINT and SIGHUP.

SIGTERM comes from Slurm before a time limit, from Kubernetes and from the host of a spot instance.
SIGINT is Ctrl-C. SIGHUP says that the terminal is gone. A run of one process handles them here.
With several processes, JAX's preemption service handles SIGTERM: it makes all processes leave
before the same step, whichever of them received the signal. The other two signals are passed on to
it as SIGTERM.

Python calls its handlers between two instructions of the main thread, which may wait for the device
for a full step. Therefore a separate thread receives the signal at once, logs it, and ends the
process on a second signal.
"""

import _thread
import contextlib
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator

from paxlite.cli.terminal import say, warn
from paxlite.core.errors import EXIT_AGAIN, Interrupted

# Seconds after the first signal from which another signal counts as the second one. Two key presses
# are at least 0.1 s apart; a process group, `timeout` or a forked child repeats a signal within
# milliseconds. Slurm sends SIGTERM twice at a time limit, and a session that ends sends SIGHUP to
# all of its remaining processes.
_SECOND_AFTER = {signal.SIGINT: 0.1, signal.SIGTERM: 2.0, signal.SIGHUP: float('inf')}
# what signal.signal returns
_Handler = Callable[[int, types.FrameType | None], object] | int | None
_STOP = 0  # no signal has this number
_SHOW_CURSOR = '\x1b[?25h'  # A progress line that is redrawn has hidden the cursor.

_listener: '_Listener | None' = None


@contextlib.contextmanager
def listening(saves: bool = True, owner: bool = False) -> Iterator[None]:
  """A context in which a first signal is noted, and a second one ends the process at once.

  The previous handlers are restored when the context ends. A context inside another one does
  nothing, and neither does one outside the main thread, because only the main thread can have
  handlers.

  Args:
    saves: Whether the run writes a checkpoint when it leaves, for the messages.
    owner: Whether the process does nothing but this run. If False (a notebook), a second Ctrl-C
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
  """Returns whether there was a signal; can be called before JAX is initialized."""
  return _listener is not None and _listener.asked


def asked_alone() -> bool:
  """Returns whether there was a signal to a run of one process, which may leave at any time."""
  return asked() and not _several_processes()


@contextlib.contextmanager
def evaluating(step: int) -> Iterator[None]:
  """A context in which a run of one process leaves at once, and evaluates `step` when it continues.

  Several processes end the evaluation first, because they leave before the same step.
  """
  if _listener is None or _several_processes():
    yield
    return
  _listener.evaluated = step
  try:
    yield
  finally:
    if _listener is not None:
      _listener.evaluated = None


def check() -> None:
  """Raises Interrupted if there was a signal before the first step, when nothing can be saved.

  One of several processes ends at once instead; the others do not know of the signal, and leave
  when they notice that this process is gone.
  """
  import jax

  if _listener is None or not _listener.asked:
    return
  message = 'told to stop before the first step: nothing was lost'
  if jax.process_count() > 1:
    warn(f'interrupted: {message}')
    os._exit(EXIT_AGAIN)
  raise Interrupted(message)


def reached(step: int, last: int) -> bool:
  """Returns whether to save and leave now; every process calls this before each step.

  Args:
    step: Number of steps that were started.
    last: Number of steps of the complete run, for the messages.
  """
  import jax
  from jax.experimental import multihost_utils

  if _listener is not None:
    _listener.step = min(step + 1, last)
  if jax.process_count() > 1:
    return multihost_utils.reached_preemption_sync_point(step)
  return _listener is not None and _listener.asked


class _Listener:
  """Receives signals in a separate thread, from the pipe that Python's C handler writes to.

  Attributes:
    asked: Whether a signal was received.
    step: The step after which the run would leave; None before training starts.
    evaluated: The step that is evaluated now; None if none is.
  """

  def __init__(self, saves: bool, owner: bool):
    self.asked = False
    self.step: int | None = None
    self.evaluated: int | None = None
    self._saves = saves
    self._owner = owner
    self._interrupted = False
    self._first = float('inf')
    self._before: dict[int, _Handler] = {}
    self._thread = threading.Thread(target=self._listen, name='signals', daemon=True)

  def __enter__(self) -> None:
    self._reader, self._writer = os.pipe()
    os.set_blocking(self._writer, False)
    self._fd_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
    self._thread.start()
    for number in _SECOND_AFTER:
      if number == signal.SIGTERM and _several_processes():
        continue  # JAX's preemption service handles it.
      if number != signal.SIGTERM and signal.getsignal(number) == signal.SIG_IGN:
        continue  # Ignored under nohup, and Ctrl-C in a script's background commands.
      self._before[number] = signal.signal(number, self._note)

  def __exit__(self, *error: object) -> None:
    for number, handler in self._before.items():
      signal.signal(number, signal.SIG_DFL if handler is None else handler)
    signal.set_wakeup_fd(self._fd_before)
    os.write(self._writer, bytes([_STOP]))
    self._thread.join()
    os.close(self._reader)
    os.close(self._writer)

  def _note(self, number: int, frame: types.FrameType | None) -> None:
    """Python's handler in the main thread, whose next instruction sees what is noted here."""
    self.asked = True
    if self._interrupted:
      self._interrupted = False  # Only once: saving and closing afterwards is not disturbed.
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
    if self.evaluated is not None:
      answer = f'leaving step {self.evaluated:,}, without saving'
      if self._saves:
        answer = f'saving step {self.evaluated:,}, which the next start evaluates'
    elif self.step is None:
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
      _thread.interrupt_main(number)  # This calls the handler once more.
      return
    if sys.stdout is not None and sys.stdout.isatty():
      say(_SHOW_CURSOR)
    os._exit(128 + number)  # the exit code by which a shell reports a signal


def _several_processes() -> bool:
  """Returns whether this is one of several processes, without importing JAX for it."""
  distributed = getattr(sys.modules.get('jax'), 'distributed', None)
  return distributed is not None and distributed.is_initialized()
